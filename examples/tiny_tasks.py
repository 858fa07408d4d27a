"""Define tools, tasks and rewards for the tiny agent of `tiny_agent.py`.

Owns three look-up or arithmetic tools, questions that need none, one or two calls, and the reward
functions in TRL's form. `tiny_agent.py` owns tokens and training. Invariant: a question of the test
split is built on a number pair, city, item or name that no train question uses.
"""

import ast
import json
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

Split = Literal["train", "test"]
Message = dict[str, Any]

# fmt: off
CITIES = (
    "Paris", "London", "Berlin", "Madrid", "Rome", "Vienna", "Prague", "Lisbon", "Dublin",
    "Oslo", "Riga", "Milan", "Porto", "Lyon", "Tokyo", "Osaka", "Kyoto", "Seoul", "Hanoi",
    "Delhi", "Cairo", "Tunis", "Lagos", "Accra", "Dakar", "Boston", "Denver", "Dallas", "Lima",
    "Bogota", "Havana", "Quito",
)
ITEMS = (
    "lamp", "chair", "table", "sofa", "desk", "shelf", "mirror", "clock", "vase", "pillow",
    "kettle", "bottle", "basket", "candle", "hammer", "ladder", "guitar", "violin", "piano",
    "drum", "tent", "scarf", "watch", "camera", "radio", "cable", "pencil", "ruler", "marker",
    "poster", "kite", "rope",
)
NAMES = (
    "Anna", "Bruno", "Carla", "David", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas",
    "Karin", "Lukas", "Maria", "Nils", "Olga", "Peter", "Rosa", "Stefan", "Tina", "Victor",
    "Wanda", "Zoe", "Adam", "Bella", "Emil", "Flora", "Igor", "Julia", "Klaus", "Nadia",
    "Oscar", "Vera",
)
# fmt: on

TEMPERATURES = {city: 2 + 7 * i % 31 for i, city in enumerate(CITIES)}  # degrees Celsius
PRICES = {item: 11 + 13 * i % 83 for i, item in enumerate(ITEMS)}  # dollars

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_MAX_DIGITS = 30  # keeps repeated multiplication from filling the memory


# ---- tools ----


_ARITHMETIC = re.compile(r"[\d\s()*+-]+", re.ASCII)


def calculator(expression: str) -> str:
    """Works out an expression of integers.

    Args:
        expression: Integers with +, -, * and parentheses, for example "12 + 3 * 4".
    """
    try:
        if not _ARITHMETIC.fullmatch(expression):
            raise ValueError
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r} is not an arithmetic expression.") from None
    return str(_value(tree.body))


def get_weather(city: str) -> str:
    """Looks up the weather of a city.

    Args:
        city: The city's name.
    """
    if city not in TEMPERATURES:
        raise ValueError(f"No weather is known for {city!r}.")
    return f"{TEMPERATURES[city]} C"


def get_price(item: str) -> str:
    """Looks up the price of one item in dollars.

    Args:
        item: The item's name.
    """
    if item not in PRICES:
        raise ValueError(f"No price is known for {item!r}.")
    return str(PRICES[item])


TOOLS: list[Callable[..., str]] = [calculator, get_weather, get_price]


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return _small(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _small(_OPERATORS[type(op)](_value(left), _value(right)))
    raise ValueError("Only integers, +, -, * and parentheses are allowed.")


def _small(value: int) -> int:
    if abs(value) >= 10**_MAX_DIGITS:
        raise ValueError(f"A number has more than {_MAX_DIGITS} digits.")
    return value


# ---- tasks ----


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Hold a correct call and its result."""

    name: str
    arguments: dict[str, str]
    result: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Hold a question, the calls that answer it in order, and the reply with `answer` in it."""

    kind: str
    question: str
    calls: tuple[Call, ...] = ()
    reply: str
    answer: str


class Draws:
    """Draw the parts of one split's questions, with the tools' own entries."""

    def __init__(self, split: Split, rng: Random) -> None:
        self.split = split
        self.rng = rng

    def operands(self, symbol: str) -> tuple[int, int]:
        while True:
            left, right = self.rng.randint(2, 99), self.rng.randint(2, 99)
            if symbol == "-":
                left, right = max(left, right), min(left, right)
            if is_held_out_pair(left, right) == (self.split == "test"):
                return left, right

    def city(self) -> tuple[str, int]:
        city = self._word(CITIES)
        return city, TEMPERATURES[city]

    def item(self) -> tuple[str, int]:
        item = self._word(ITEMS)
        return item, PRICES[item]

    def name(self) -> str:
        return self._word(NAMES)

    def _word(self, words: Sequence[str]) -> str:
        return self.rng.choice(words_of(self.split, words))


class PracticeDraws(Draws):
    """Draw for demonstrations: the number pairs of the train split, and every word.

    Weather and prices are invented each time. So the agent knows the words but not what a tool
    returns for them, and must call it.
    """

    def __init__(self, rng: Random) -> None:
        super().__init__("train", rng)

    def city(self) -> tuple[str, int]:
        return self.rng.choice(CITIES), self.rng.randint(2, 32)

    def item(self) -> tuple[str, int]:
        return self.rng.choice(ITEMS), self.rng.randint(11, 93)

    def name(self) -> str:
        return self.rng.choice(NAMES)


def is_held_out_pair(left: int, right: int) -> bool:
    """Return whether `left` and `right` are operands in test questions only: every fifth pair."""
    return (left * 7 + right * right) % 5 == 0


def words_of(split: Split, words: Sequence[str]) -> list[str]:
    """Return the split's words; every fourth word is for test questions only."""
    return [word for i, word in enumerate(words) if (i % 4 == 3) == (split == "test")]


# In every question a word from the lists stands before a punctuation mark, as it does in a call's
# JSON: then it has the same tokens in both.
_CALC = ("What is {}?", "Compute {}.", "Tell me {}.", "Please work out {}.", "I need {}.", "{} = ?")
_CHAIN = ("Work out {}, then {} {}.", "First take {}, then {} {}.", "Start from {} and {} {}.")
_CHAIN_STEPS = {"+": "add", "-": "subtract", "*": "multiply by"}
# fmt: off
_WEATHER = (
    "What is the weather in {}?", "How is it outside in {}?", "Tell me the weather of {}.",
    "I travel to {}. Is it warm?", "Do I need a coat in {}?", "Weather report for {}, please.",
)
_PRICE = (
    "How much is the {}?", "What do I pay for one {}?", "Tell me the price of a {}.",
    "I want a {}. What is the price?", "Price of the {}, please.", "Is the {}, in dollars, cheap?",
)
_TOTAL = (
    "I buy {} of the {}. What do I pay?", "What is the total for {} of the {}?",
    "Sum for {} of the {}, please.",
)
_CHAT = (
    "Hello, I am {}.", "Hi! My name is {}.", "Good morning, this is {}.", "{}, that is me.",
    "People call me {}.", "Hey, it is {}!",
)
# fmt: on


def _calc(draws: Draws) -> Task:
    call = _calculation(*_first_step(draws))
    question = draws.rng.choice(_CALC).format(call.arguments["expression"])
    return _sum_task("calc", question, call)


def _chain(draws: Draws) -> Task:
    first = _calculation(*_first_step(draws))
    symbol = draws.rng.choice("+-*")
    number = draws.rng.randint(2, 9 if symbol == "*" else 99)
    second = _calculation(first.result, symbol, number)
    question = draws.rng.choice(_CHAIN).format(
        first.arguments["expression"], _CHAIN_STEPS[symbol], number
    )
    return _sum_task("chain", question, first, second)


def _weather(draws: Draws) -> Task:
    city, temperature = draws.city()
    weather = f"{temperature} C"
    return Task(
        kind="weather",
        question=draws.rng.choice(_WEATHER).format(city),
        calls=(Call(name="get_weather", arguments={"city": city}, result=weather),),
        reply=f"It is {weather} in {city}.",
        answer=weather,
    )


def _price(draws: Draws) -> Task:
    item, price = draws.item()
    return Task(
        kind="price",
        question=draws.rng.choice(_PRICE).format(item),
        calls=(Call(name="get_price", arguments={"item": item}, result=str(price)),),
        reply=f"It costs {price} dollars.",
        answer=str(price),
    )


def _total(draws: Draws) -> Task:
    item, price = draws.item()
    count = draws.rng.randint(2, 9)
    total = _calculation(count, "*", price)
    return Task(
        kind="total",
        question=draws.rng.choice(_TOTAL).format(count, item),
        calls=(Call(name="get_price", arguments={"item": item}, result=str(price)), total),
        reply=f"You pay {total.result} dollars.",
        answer=total.result,
    )


def _chat(draws: Draws) -> Task:
    name = draws.name()
    reply = f"Nice to meet you, {name}."
    question = draws.rng.choice(_CHAT).format(name)
    return Task(kind="chat", question=question, reply=reply, answer=reply.removesuffix("."))


def _first_step(draws: Draws) -> tuple[int, str, int]:
    symbol = draws.rng.choice("+-*")
    left, right = draws.operands(symbol)
    return left, symbol, right


def _calculation(left: int | str, symbol: str, right: int) -> Call:
    expression = f"{left} {symbol} {right}"
    return Call(
        name="calculator", arguments={"expression": expression}, result=calculator(expression)
    )


def _sum_task(kind: str, question: str, *calls: Call) -> Task:
    result = calls[-1].result
    reply = f"The result is {result}."
    return Task(kind=kind, question=question, calls=calls, reply=reply, answer=result)


BUILDERS: dict[str, Callable[[Draws], Task]] = {
    "calc": _calc,
    "chain": _chain,
    "weather": _weather,
    "price": _price,
    "total": _total,
    "chat": _chat,
}
SMALL_KINDS = ("calc", "price", "chat")


def distinct_tasks(
    split: Split, num_tasks: int, seed: int, kinds: Sequence[str] = tuple(BUILDERS)
) -> list[Task]:
    """Return tasks with distinct questions, alternating kinds until they are used up.

    Raises:
        ValueError: the split has fewer distinct questions than `num_tasks`.
    """
    draws = Draws(split, Random(f"{split} {seed}"))
    tasks: dict[str, Task] = {}
    left = list(kinds)
    while left and len(tasks) < num_tasks:
        kind = left.pop(0)
        new = next((task for task in _drawn(kind, draws) if task.question not in tasks), None)
        if new is not None:
            tasks[new.question] = new
            left.append(kind)
    if len(tasks) < num_tasks:
        raise ValueError(
            f"num_tasks must be at most {len(tasks)} for this split and kinds, got {num_tasks}."
        )
    return list(tasks.values())


def _drawn(kind: str, draws: Draws, num_attempts: int = 200) -> Iterator[Task]:
    return (BUILDERS[kind](draws) for _ in range(num_attempts))


def make_tasks(
    split: Split, num_tasks: int, seed: int = 0, kinds: Sequence[str] = tuple(BUILDERS)
) -> list[dict[str, Any]]:
    """Return rows for a `datasets.Dataset`: `prompt` (one user message), `answer` and `kind`.

    Held out from every train question: each number pair of `is_held_out_pair`, and every fourth
    city, item and name. A test question has such a pair as the operands of its first calculation,
    or such a word. The agent's own demonstrations hold out the pairs, too, but use every word (so a
    question about a word may be among them), with made-up weather and prices. The phrasings are the
    same in both splits.

    Raises:
        ValueError: the split has fewer distinct questions than `num_tasks`.
    """
    return [
        {
            "prompt": [{"role": "user", "content": task.question}],
            "answer": task.answer,
            "kind": task.kind,
        }
        for task in distinct_tasks(split, num_tasks, seed, kinds)
    ]


def demonstration(task: Task) -> list[Message]:
    """Return the whole conversation of an agent that makes no mistake."""
    messages: list[Message] = [{"role": "user", "content": task.question}]
    for call in task.calls:
        function = {"name": call.name, "arguments": call.arguments}
        tool_calls = [{"type": "function", "function": function}]
        messages.append({"role": "assistant", "content": "", "tool_calls": tool_calls})
        messages.append({"role": "tool", "name": call.name, "content": call.result})
    return [*messages, {"role": "assistant", "content": task.reply}]


# ---- rewards ----


def correct_reward(
    completions: list[list[Message]], answer: list[str], **kwargs: Any
) -> list[float]:
    """Return 1.0 if the last message is an assistant's answer without calls that is right, or 0."""
    return [
        float(_states(_final_content(messages), expected))
        for messages, expected in zip(completions, answer, strict=True)
    ]


def format_reward(completions: list[list[Message]], **kwargs: Any) -> list[float]:
    """Return 0.2 times the share of tool messages without an error; 0.0 if there are none."""
    return [_share_without_error(messages) * 0.2 for messages in completions]


def _final_content(messages: list[Message]) -> str:
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or last.get("tool_calls"):
        return ""
    return last.get("content") or ""


def _states(text: str, answer: str) -> bool:
    """Return whether `text` has `answer` by itself, as "112", "-12" and "12.5" don't have "12"."""
    text, answer = (" ".join(part.lower().split()) for part in (text, answer))
    return re.search(rf"(?<![\w.,-]){re.escape(answer)}(?!\w|[.,]\d)", text) is not None


def _share_without_error(messages: list[Message]) -> float:
    contents = [message["content"] for message in messages if message["role"] == "tool"]
    return sum(not _is_error(content) for content in contents) / max(len(contents), 1)


def _is_error(content: str) -> bool:
    try:
        value = json.loads(content)
    except ValueError:
        return False
    return isinstance(value, dict) and "error" in value
