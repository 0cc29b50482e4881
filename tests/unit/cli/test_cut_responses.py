"""What ``llamarl eval`` says of responses that a limit ended."""

import pytest
from made_responses import made_group, made_response

from llamarl.cli import eval as eval_verb
from llamarl.config import validate


def test_an_evaluation_tells_the_share_of_responses_that_a_limit_cut(capsys: pytest.CaptureFixture[str]) -> None:
    ends = ["stop", "length", "stop", "length", "stop", "stop", "stop", "stop"]
    group = made_group(made_response(i, finish_reason=end) for i, end in enumerate(ends))
    config = validate({"model": {"path": "bundled:tiny"}, "task": {"name": "steps"}})
    eval_verb._tell_failed_and_cut([group], config)
    said = "25.0% of the responses were cut by generator.sampling.max_new_tokens = 128 and judged as they stand\n"
    assert capsys.readouterr().err == said
    eval_verb._tell_failed_and_cut([made_group([made_response()])], config)
    assert capsys.readouterr().err == ""
