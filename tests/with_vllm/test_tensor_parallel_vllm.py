"""vLLM over two processes of its own (tensor parallel): tokens, log-probs and weights are those of one, and a job trains."""

import pytest
from sampling_with_vllm import (
    BOUND,
    BUNDLED,
    changed_model,
    drain,
    endings,
    give,
    largest_gap,
    native_engine,
    prompts,
    sequences,
    vllm_engine,
)

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")


@pytest.mark.timeout(900)
def test_two_ranks_sample_what_the_native_engine_does_before_and_after_new_weights() -> None:
    engine = vllm_engine(BUNDLED, name="vllm", options={"tensor_parallel_size": 2})
    ours = native_engine(BUNDLED)
    of = prompts(6)
    assert endings(drain(engine, sequences(of, tokens=8, temperature=0.0))) == endings(
        drain(ours, sequences(of, tokens=8, temperature=0.0))
    )
    changed = changed_model(BUNDLED, seed=1)
    for each in (engine, ours):
        give(each, dict(changed.named_parameters()), version=1)
    drawn = drain(engine, sequences(of, tokens=8))
    assert largest_gap(changed, drawn) < BOUND
    assert {v for s in drawn for v in s.policy_versions} == {1}
    assert endings(drain(engine, sequences(of, tokens=8, temperature=0.0))) == endings(
        drain(ours, sequences(of, tokens=8, temperature=0.0))
    )
