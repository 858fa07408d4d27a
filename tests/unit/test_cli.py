"""The command line itself: every command explains itself."""

import pytest

from agent_vllm.cli import COMMANDS, main


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_is_printed_for_every_command(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"] if command is None else [command, "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: agent-vllm {command or '[-h]'}")
    if command is None:
        assert all(name in printed for name in COMMANDS)


def test_simulate_help_says_which_share_of_a_link_is_used(capsys):
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    assert "80% of the nominal rate" in " ".join(capsys.readouterr().out.split())


def test_the_example_says_how_to_pass_settings_of_the_trainer(capsys, monkeypatch):
    from train_tool_agent import parse_arguments

    monkeypatch.setattr("sys.argv", ["train_tool_agent.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        parse_arguments()
    assert ended.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Every setting of AgentGRPOConfig" in printed and "--config FILE.yaml" in printed
