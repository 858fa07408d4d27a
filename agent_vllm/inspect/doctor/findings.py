"""What checks find, and the running of a list of checks.

Invariant: every check of a list gives one finding, in order; a check whose needs did not hold is
skipped and says so, and what a check raises is its finding.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Generic, Literal, TypeVar

from transformers import PreTrainedTokenizerBase

from agent_vllm.errors import AgentVLLMError

Status = Literal["pass", "note", "fail", "skipped"]
State = TypeVar("State")
_MAX_ERROR = 400  # characters of an error's text that are shown
_NUM_SHOWN = 4  # tokens to each side of a spot


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one check saw.

    Attributes:
        status: "pass"; "note" (fine, but worth knowing); "fail"; "skipped" (could not run).
        evidence: what was seen, figures and ids with their text.
        remedy: what to do about it; empty where nothing is to be done.
    """

    status: Status
    evidence: str
    remedy: str = ""
    name: str = ""  # of the check; the list of checks fills it in


@dataclass(frozen=True, kw_only=True, slots=True)
class Check(Generic[State]):
    """One question, asked of a state that earlier checks may have filled.

    Attributes:
        find: answers it; whatever it raises is a failure.
        needs: names of earlier checks that must not have failed or been skipped.
        remedy: what to do where `find` raises an error that doesn't say so itself.
    """

    name: str
    find: Callable[[State], Finding]
    needs: tuple[str, ...] = ()
    remedy: str = ""


@dataclass(kw_only=True)
class Report:
    """Findings in order.

    Attributes:
        on_finding: told of each as it is added.
    """

    findings: list[Finding] = field(default_factory=list)
    on_finding: Callable[[Finding], None] = lambda _: None

    @property
    def passed(self) -> bool:
        """Whether nothing failed; notes and skipped checks are no failures."""
        return not any(finding.status == "fail" for finding in self.findings)

    def status_of(self, name: str) -> Status | None:
        """The status of the check of that name; None where it was not asked."""
        return next((f.status for f in self.findings if f.name == name), None)

    def add(self, finding: Finding) -> None:
        self.findings.append(finding)
        self.on_finding(finding)

    def as_dict(self) -> dict[str, Any]:
        """In JSON's types."""
        return {"passed": self.passed, "findings": [asdict(finding) for finding in self.findings]}

    def run(self, checks: Sequence[Check[State]], state: State, suffix: str = "") -> None:
        """Ask every check; `suffix` is added to the names of this list's checks."""
        own = {check.name for check in checks}
        for check in checks:
            needs = [name + suffix if name in own else name for name in check.needs]
            broken = [name for name in needs if self.status_of(name) in ("fail", "skipped")]
            finding = _not_run(broken) if broken else _find(check, state)
            self.add(replace(finding, name=check.name + suffix))


def _not_run(broken: list[str]) -> Finding:
    return Finding(status="skipped", evidence=f"Not run: needs {', '.join(broken)}.")


def _find(check: Check[State], state: State) -> Finding:
    try:
        return check.find(state)
    except Exception as error:  # of a model, a template or a tool file, which may raise anything
        text = str(error).strip() or "no message"
        if len(text) > _MAX_ERROR:
            text = text[:_MAX_ERROR] + " [...]"
        if isinstance(error, AgentVLLMError):  # says itself what to do
            return Finding(status="fail", evidence=text)
        evidence = f"{type(error).__name__}: {text}"
        return Finding(status="fail", evidence=evidence, remedy=check.remedy)


def show_ids(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], spot: int) -> str:
    """The ids around index `spot` with their text, the one at the spot in brackets."""
    first, last = max(spot - _NUM_SHOWN, 0), spot + _NUM_SHOWN + 1
    shown = [f"{id_} {tokenizer.decode([id_])!r}" for id_ in ids[first:last]]
    if spot - first < len(shown):
        shown[spot - first] = f"[{shown[spot - first]}]"
    return ", ".join(shown)
