"""One vLLM engine in a process of its own: a request on stdin, log-probabilities in a file.

Request: {"model": path, "prompts": [str], "new_tokens": int, "engine": {keyword: value}, "answer": path}, and with
"cuda_shape": true the graph has the shape that it has on NVIDIA (cuda_shape.py). The answer is a list of {"ids": prompt
and generated tokens, "logprobs": of every token after the first}. With "cuda_shape" a
last line on stdout has the calls of our layers by number of tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import cuda_shape


def main() -> None:
    from vllm import LLM, SamplingParams

    request: dict[str, Any] = json.load(sys.stdin)
    if request.get("cuda_shape"):
        cuda_shape.install()
        request["engine"]["compilation_config"] = cuda_shape.COMPILATION
    engine = LLM(
        model=request["model"], max_model_len=256, max_num_seqs=8, dtype="bfloat16", **request["engine"]
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=request["new_tokens"], ignore_eos=True, prompt_logprobs=0, logprobs=0
    )
    answer = []
    for result in engine.generate(request["prompts"], sampling, use_tqdm=False):
        generated = result.outputs[0]
        ids = [*result.prompt_token_ids, *generated.token_ids]
        chosen = zip(ids[1:], [*result.prompt_logprobs[1:], *generated.logprobs], strict=True)
        answer.append({"ids": ids, "logprobs": [candidates[token].logprob for token, candidates in chosen]})
    Path(request["answer"]).write_text(json.dumps(answer))
    if request.get("cuda_shape"):
        print(json.dumps({"calls": dict(cuda_shape.calls)}), flush=True)


if __name__ == "__main__":  # vLLM starts its workers by importing this file
    main()
