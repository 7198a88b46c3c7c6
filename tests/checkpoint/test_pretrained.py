"""Models in and out: what transformers writes is read, what is written transformers reads."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from parallax import ParallaxError, parse
from parallax.core.slices import local
from parallax.testing import World, pool, toys

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "intermediate_size": 64}


def llama(tied: bool = False) -> nn.Module:
    config = transformers.LlamaConfig(
        **SMALL, **HEADS, num_key_value_heads=2, tie_word_embeddings=tied
    )
    return transformers.LlamaForCausalLM(config)


def tied_llama() -> nn.Module:
    return llama(tied=True)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, **HEADS))


MODELS = {"llama": llama, "tied llama": tied_llama, "gpt2": gpt2, "bert": bert}
TOKENS = torch.arange(24).view(4, 6)


def loss(model: Any, tokens: Tensor) -> Tensor:
    return model(tokens, labels=tokens).loss


def make(name: str, text: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = MODELS[name]()
    return parse(text)(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def refusal(call: Any) -> str:
    try:
        call()
    except ParallaxError as error:
        return str(error)
    return "nothing was raised"


def logits(directory: str | Path, **options: Any) -> Tensor:
    config = json.loads((Path(directory) / "config.json").read_text())
    kind = getattr(transformers, config["architectures"][0])
    model, info = kind.from_pretrained(directory, output_loading_info=True, **options)
    tied = {"lm_head.weight", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    assert set(info["missing_keys"]) <= tied
    assert not info["unexpected_keys"]
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def trained(name: str, text: str, directory: str, how: str) -> Tensor | None:
    """Trains two steps, writes, and gives the logits of the weights gathered to one process."""
    boosted = make(name, text)
    for _ in range(2):
        boosted.train_step(loss, boosted.shard(TOKENS))
    if how == "save":
        boosted.save(directory, shard_size="20KiB")
    else:
        boosted.export(directory, shard_size="20KiB" if how == "shards" else "1GiB")
    whole = boosted.gather()
    if whole is None:
        return None
    torch.manual_seed(0)
    model = MODELS[name]()
    model.load_state_dict({**whole["params"], **whole["buffers"]}, strict=False)
    model.tie_weights()
    with torch.no_grad():
        return model.eval()(TOKENS).logits


CASES = [
    ("llama", 4, "tp(2), zero(3)", "one"),
    ("llama", 2, "tp(2)", "save"),
    ("tied llama", 2, "zero(3), bf16", "shards"),
    ("gpt2", 2, "zero(2)", "save"),
    ("bert", 2, "zero(3)", "shards"),
    ("bert", 1, "dp()", "one"),
]


@pytest.mark.parametrize(("name", "size", "text", "how"), CASES)
def test_transformers_reads_what_any_composition_writes(
    name: str, size: int, text: str, how: str, tmp_path: Path
) -> None:
    expected = pool(size).run(trained, name, text, str(tmp_path / "m"), how)[0]
    assert expected is not None
    assert torch.equal(logits(tmp_path / "m"), expected)
    files = {p.name for p in (tmp_path / "m").iterdir()}
    assert ("model.safetensors.index.json" in files) == (how != "one")
    assert ("model.safetensors" in files) == (how == "one")


def exported(directory: str, tokenizer: str) -> list[str]:
    boosted = make("llama", "zero(3), bf16, ema(0.5)")
    boosted.train_step(loss, boosted.shard(TOKENS))
    boosted.export(f"{directory}/bf16", dtype="bf16", tokenizer=tokenizer)
    boosted.export(f"{directory}/bf16", dtype=torch.bfloat16)  # replaces its own like
    boosted.export(f"{directory}/plain")
    with boosted.averaged():
        boosted.export(f"{directory}/averages")
    boosted.export(f"{directory}/again", tokenizer=tokenizer)
    return [
        refusal(lambda: boosted.export(f"{directory}/x", dtype="int8")),
        refusal(lambda: boosted.export(f"{directory}/x", tokenizer=f"{directory}/none")),
        refusal(lambda: boosted.export(f"{directory}/x", shard_size="some")),
        refusal(lambda: boosted.export(tokenizer)),
    ]


def test_dtype_tokenizer_and_averages(world2: World, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "spiece.model").write_bytes(b"\xff\x00")
    (folder / "notes.txt").write_text("mine")
    for found in world2.run(exported, str(tmp_path / "out"), str(folder)):
        assert found[0] == (
            "export was given dtype='int8'.\n\nGive a floating-point dtype, such as "
            "torch.bfloat16, or one of bf16, fp16, fp32, fp64."
        )
        assert found[1].startswith(
            f"export was given tokenizer={str(tmp_path / 'out' / 'none')!r}, which is neither a "
            "tokenizer nor a directory with files of one (tokenizer*, "
        )
        assert found[2] == (
            "export was given shard_size='some'. Give bytes, such as 1073741824 or '1GiB'."
        )
        assert found[3] == (
            f"{folder} exists and is no checkpoint, so it is not replaced.\n\nGive a directory of "
            "its own."
        )
    out = tmp_path / "out"
    plain = load_file(out / "plain" / "model.safetensors")
    narrow = load_file(out / "bf16" / "model.safetensors")
    assert {t.dtype for t in narrow.values()} == {torch.bfloat16}
    assert all(torch.equal(narrow[n], t.bfloat16()) for n, t in plain.items())
    config = json.loads((out / "bf16" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert logits(out / "bf16", dtype="auto").dtype == torch.bfloat16
    # Decay 0.5 after one step: half way from the first weights.
    torch.manual_seed(0)
    first = dict(MODELS["llama"]().named_parameters())
    averages = load_file(out / "averages" / "model.safetensors")
    for name, value in averages.items():
        torch.testing.assert_close(value, (first[name].detach() + plain[name]) / 2)
    names = {p.name for p in (out / "again").iterdir()}
    assert {"tokenizer.json", "spiece.model"} < names
    assert "notes.txt" not in names
    assert (out / "again" / "spiece.model").read_bytes() == b"\xff\x00"
    assert not (out / "x").exists()


def other_models(directory: str) -> list[str]:
    boosted = parse("zero(3)")(toys.Gpt(tied=True))
    boosted.export(directory)
    return sorted(p.name for p in Path(directory).iterdir())


def test_a_model_without_configuration(world2: World, tmp_path: Path) -> None:
    found = world2.run(other_models, str(tmp_path / "m"))[0]
    assert found == ["index.json", "model.safetensors"]


# -- reading ---------------------------------------------------------------------------------------


def loaded(name: str, text: str, path: str, strict: bool = True) -> tuple[Any, Any]:
    boosted = make(name, text, seed=5)
    found = boosted.load_pretrained(path, strict=strict)
    return boosted.gather(), tuple(found)


def assert_holds(whole: Any, model: nn.Module) -> None:
    for name, value in model.named_parameters():
        assert torch.equal(whole["params"][name], value.detach()), name


FORMATS = ["one file", "shards", "bin", "bin shards", "file", "own", "exported"]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_any_form_into_any_composition(name: str, form: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    path = tmp_path / "m"
    if form in ("own", "exported"):
        verb = "save" if form == "own" else "export"
        pool(2).run(written, name, str(path), verb)
    elif form == "bin":
        path.mkdir()
        torch.save(model.state_dict(), path / "pytorch_model.bin")
    elif form == "bin shards":
        sharded_bin(model, path)
    else:
        model.save_pretrained(path, max_shard_size="20KB" if form == "shards" else "1GB")
        path = path / "model.safetensors" if form == "file" else path
    size, text = (4, "tp(2), zero(2)") if name == "llama" else (2, "zero(3), bf16")
    whole, found = pool(size).run(loaded, name, text, str(path))[0]
    assert found == ((), ())
    assert_holds(whole, model)


def written(name: str, path: str, verb: str) -> None:
    getattr(make(name, "zero(2)"), verb)(path)


def sharded_bin(model: nn.Module, path: Path) -> None:
    path.mkdir()
    places = {}
    rows = list(model.state_dict().items())
    for number, part in enumerate((rows[::2], rows[1::2]), 1):
        file = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save(dict(part), path / file)
        places |= dict.fromkeys(dict(part), file)
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))


def test_a_base_into_a_model_with_a_head_and_back(world2: World, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = bert()
    model.bert.save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "head")
    whole, (missing, unexpected) = world2.run(
        loaded, "bert", "zero(3)", str(tmp_path / "base"), False
    )[0]
    assert all(name.startswith("cls.") for name in missing)
    assert missing
    assert unexpected == ()
    for name, value in model.bert.named_parameters():
        assert torch.equal(whole["params"][f"bert.{name}"], value.detach())
    text = world2.run(refused, "bert", str(tmp_path / "base"))[0][0]
    assert "cls.predictions.transform.dense.weight is in the model only" in text
    MODELS["base"] = lambda: bert().bert
    whole, (missing, unexpected) = pool(1).run(into_base, str(tmp_path / "head"))[0]
    assert missing == ()
    assert all(name.startswith("cls.") for name in unexpected)
    assert_holds(whole, model.bert)


def into_base(path: str) -> Any:
    boosted = parse("dp()")(bert().bert)
    found = boosted.load_pretrained(path, strict=False)
    return boosted.gather(), tuple(found)


def refused(name: str, path: str) -> tuple[str, bool]:
    boosted = make(name, "zero(3)", seed=5)
    before = [local(p).clone() for p in boosted.params.values()]
    text = refusal(lambda: boosted.load_pretrained(path))
    after = [local(p) for p in boosted.params.values()]
    return text, all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_what_does_not_fit_changes_nothing_and_is_all_named(world2: World, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    rows = {n: p.detach().clone() for n, p in llama().named_parameters()}
    rows.pop("model.norm.weight")
    rows["lm_head.weight"] = rows["lm_head.weight"][:-1].contiguous()
    rows["extra"] = torch.ones(1)
    save_file(rows, path)
    for found in world2.run(refused, "llama", str(path)):
        assert found == (
            (
                f"{path} does not fit LlamaForCausalLM:\n  lm_head.weight has shape (63, 32) in "
                "the "
                "file and (64, 32) in the model\n  model.norm.weight is in the model only\n  "
                "extra is "
                "in the file only\n\nBuild the model as it was when it was saved, or use "
                "strict=False "
                "to load the names that both have."
            ),
            True,
        )


class Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def test_an_old_file_runs_no_code(
    world2: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": Runs()}, tmp_path / "pytorch_model.bin")
    for text, same in world2.run(refused, "llama", str(tmp_path / "pytorch_model.bin")):
        assert "is refused: it asks for posix.mkdir" in text
        assert same
    assert not (tmp_path / "ran").exists()


def test_a_damaged_own_checkpoint_is_found_before_anything_changes(
    world2: World, tmp_path: Path
) -> None:
    path = tmp_path / "m"
    world2.run(written, "llama", str(path), "save")
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    for text, same in world2.run(refused, "llama", str(path)):
        assert "is damaged: its bytes do not have the checksum" in text
        assert same


def test_a_name_in_the_local_cache(
    world2: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout of the cache: blobs by hash would be links; a snapshot of files is as good."""
    commit = "0" * 40
    folder = tmp_path / "models--mine--llama"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    torch.manual_seed(0)
    model = llama()
    model.save_pretrained(folder / "snapshots" / commit)

    def run() -> Any:
        import huggingface_hub.constants as constants

        constants.HF_HUB_CACHE = str(tmp_path)
        boosted = make("llama", "zero(3)", seed=5)
        boosted.load_pretrained("mine/llama")
        return boosted.gather(), refusal(lambda: boosted.load_pretrained("mine/none"))

    del monkeypatch
    whole, text = world2.run(run)[0]
    assert_holds(whole, model)
    assert text == (
        "mine/none is no file or directory, and no model in the local cache of Hugging Face: "
        "LocalEntryNotFoundError.\n\nGive a path, or fetch it first: hf download mine/none."
    )
