"""Run a list of checks and collect their findings in a report.

Invariant: every check gives one finding, in order. A check that needs one that failed is skipped
and says so; an exception that a check raises is its finding.
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
    """The result of one check.

    Attributes:
        status: "pass"; "note" (fine, but worth knowing); "fail"; "skipped" (could not run).
        evidence: what was observed: figures, and token ids with their text.
        remedy: what to do about it; empty if there is nothing to do.
        name: of the check; filled in by the report.
    """

    status: Status
    evidence: str
    remedy: str = ""
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check(Generic[State]):
    """One check of a state, which earlier checks may have filled in.

    Attributes:
        name: shown in the report.
        find: does the check; an exception from it is a failure.
        needs: names of earlier checks that must not have failed or been skipped.
        remedy: what to do if `find` raises an error that does not say so itself.
    """

    name: str
    find: Callable[[State], Finding]
    needs: tuple[str, ...] = ()
    remedy: str = ""


@dataclass(kw_only=True)
class Report:
    """The findings of all checks, in order.

    Attributes:
        findings: one per check.
        on_finding: called with each finding that is added.
    """

    findings: list[Finding] = field(default_factory=list)
    on_finding: Callable[[Finding], None] = lambda _: None

    @property
    def passed(self) -> bool:
        """Return whether no check failed; notes and skipped checks are not failures."""
        return not any(finding.status == "fail" for finding in self.findings)

    def status_of(self, name: str) -> Status | None:
        """Return the status of the check of this name, or None if it has not run."""
        return next((f.status for f in self.findings if f.name == name), None)

    def add(self, finding: Finding) -> None:
        """Append a finding and pass it to `on_finding`."""
        self.findings.append(finding)
        self.on_finding(finding)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {"passed": self.passed, "findings": [asdict(finding) for finding in self.findings]}

    def run(self, checks: Sequence[Check[State]], state: State, suffix: str = "") -> None:
        """Run every check; `suffix` is added to the names of this list's checks."""
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
    """Return the ids around index `spot` with their text, the one at the spot in brackets."""
    first, last = max(spot - _NUM_SHOWN, 0), spot + _NUM_SHOWN + 1
    shown = [f"{id_} {tokenizer.decode([id_])!r}" for id_ in ids[first:last]]
    if spot - first < len(shown):
        shown[spot - first] = f"[{shown[spot - first]}]"
    return ", ".join(shown)
