"""LoRA adapters of the demo model behind `kvasir serve`: each a model of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
import transformers

from engine.demo import MODEL_DIR
from tests.fakes.lora import ALL, write_adapter
from tests.fakes.server import Server

PROMPT = " ".join(f"Rule {number}: take {number % 5} bags." for number in range(40))


@pytest.mark.slow
def test_each_adapter_answers_under_its_name_from_blocks_of_its_own(tmp_path: Path) -> None:
    module: Any = transformers.AutoModelForCausalLM.from_pretrained(MODEL_DIR)
    folders = {name: write_adapter(tmp_path / name, module, ALL, seed) for seed, name in enumerate(("one", "two"))}
    lora = ",".join(f"{name}={folder}" for name, folder in folders.items())
    with Server(tmp_path / "data", "--lora", lora) as server:
        client = server.client("unused")

        def ask(model: str) -> tuple[str, int]:
            answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=12, temperature=0)
            assert answer.model == model
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens or 0

        parents = {"demo": None, "one": "demo", "two": "demo"}
        listed = {model.id: (model.model_extra or {}).get("parent") for model in client.models.list()}
        assert {name: listed[name] for name in listed if "MiniLM" not in name} == parents  # that one is for embeddings
        cold, warm = ([ask(name) for name in parents] for _ in range(2))
        assert [tokens for _, tokens in cold] == [0, 0, 0]
        assert all(tokens > 100 for _, tokens in warm)
        assert [text for text, _ in warm] == [text for text, _ in cold]
        assert len({text for text, _ in cold}) == 3
        with pytest.raises(openai.NotFoundError):
            ask("three")
