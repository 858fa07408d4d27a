"""Objects that break whoever looks at them, errors that can't be shown; for `test_boundaries.py`.

Each is made anew by its entry: some of them can be used only once.
"""

import collections
import itertools
import time


class Escape(BaseException):
    """What `except Exception` lets through."""


class Unprintable(Exception):
    def __str__(self):
        raise Escape("no text")

    __repr__ = __str__


class UnprintableEscape(Escape):
    def __str__(self):
        raise Unprintable

    __repr__ = __str__


def refuse(*_, **__):
    raise Escape("do not look")


_LOOKS = (
    "__await__", "__bool__", "__contains__", "__deepcopy__", "__eq__", "__float__", "__format__",
    "__getattr__", "__getitem__", "__hash__", "__index__", "__int__", "__iter__", "__len__",
    "__lt__", "__next__", "__reduce_ex__", "__repr__", "__str__",
)  # fmt: skip


def refusing(*looks, base=object, made_from=()):
    """An object whose methods of these names raise."""
    kind = type("Hostile", (base,), dict.fromkeys(looks, refuse) | {"__hash__": base.__hash__})
    return kind(*made_from)


class LyingClass:
    """Its class can't be asked for."""

    @property
    def __class__(self):
        raise Escape("no class")


class LyingText(str):
    """A text that is another one whenever it is asked."""

    __slots__ = ()

    def __str__(self):
        return 3  # type: ignore[return-value]

    __len__ = __getitem__ = __iter__ = __eq__ = encode = startswith = partition = refuse
    __hash__ = str.__hash__


class Endless(collections.abc.Sequence):
    """Has no last item."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return index

    def __iter__(self):
        return itertools.count()


class EndlessMapping(dict):
    def items(self):
        return ((n, n) for n in itertools.count())

    keys = __iter__ = lambda self: itertools.count()


class NeverText:
    """Takes longer to become text than anybody waits."""

    def __str__(self):
        while True:
            time.sleep(0.01)

    __repr__ = __str__


class RefusesToGo:
    def __del__(self):
        raise Escape("not yet")


def circle(kind):
    value = kind()
    (value.append if kind is list else value.__setitem__)(
        *([value] if kind is list else ["a", value])
    )
    return value


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def _in_a_cycle(error):
    error.__cause__ = error
    return error


VALUES = {
    **{f"refuses {look}": lambda look=look: refusing(look) for look in _LOOKS},
    "refuses everything": lambda: refusing(*_LOOKS),
    "int that refuses": lambda: refusing("__repr__", "__str__", base=int, made_from=[3]),
    "float that refuses": lambda: refusing("__repr__", "__float__", base=float, made_from=[3.0]),
    "str that refuses": lambda: refusing("__str__", "__len__", base=str, made_from=["x"]),
    "list that refuses": lambda: refusing("__iter__", "__len__", base=list, made_from=[[1]]),
    "dict that refuses": lambda: refusing(
        "items", "__iter__", "__len__", base=dict, made_from=[{"a": 1}]
    ),
    "bytes that refuse": lambda: refusing("__bytes__", "decode", base=bytes, made_from=[b"x"]),
    "no class": LyingClass,
    "lying text": lambda: LyingText("abc"),
    "endless sequence": Endless,
    "endless mapping": EndlessMapping,
    "endless generator": itertools.count,
    "never text": NeverText,
    "refuses to go": RefusesToGo,
    "a list of itself": lambda: circle(list),
    "a dict of itself": lambda: circle(dict),
    "nested deeply": lambda: nested(100_000),
    "hostile key": lambda: {refusing("__repr__", "__str__"): 1},
    "hostile item": lambda: [{"a": refusing(*_LOOKS)}],
    "huge number": lambda: 10**5000,
    "a class": lambda: Unprintable,
    "an error": Unprintable,
}
ERRORS = {
    "unprintable": Unprintable,
    "BaseException": lambda: Escape("out"),
    "unprintable BaseException": UnprintableEscape,
    "SystemExit": lambda: SystemExit(refusing("__str__", "__repr__")),
    "group of hostile": lambda: BaseExceptionGroup("some", [UnprintableEscape()]),
    "args that refuse": lambda: ValueError(refusing("__str__", "__repr__")),
    "its own cause": lambda: _in_a_cycle(ValueError("cycle")),
    "StopIteration": lambda: StopIteration(refusing("__repr__", "__str__")),
    "GeneratorExit": GeneratorExit,
    "text that lies": lambda: ValueError(LyingText("abc")),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "\ud83d"),
}
