"""docs/models.md, made from the registries: python -m vllm_blend.models_page > docs/models.md"""

from __future__ import annotations

from collections.abc import Iterator

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from vllm_blend.finetune.attention import MODEL_TYPES
from vllm_blend.models.decoder import DecoderForCausalLM
from vllm_blend.models.gguf.families import GGUF_FAMILIES
from vllm_blend.models.registry import MODEL_REGISTRY
from vllm_blend.models.text_parts import TextPart
from vllm_blend.models.weight_formats import WEIGHT_FORMATS
from vllm_blend.ops.int4_tiles import KERNEL_ROWS

_INTRODUCTION = """# Supported models

From Hugging Face directories, or by a Hub id. Every architecture is compared with `transformers` by small random
models: their logits alone and on two and four ranks, and their greedy tokens and log-probabilities, also blended at a
recompute ratio of 1.0 by every rule. Of multimodal models the text's logits are compared. A model of your own is a
class in the registry ([architecture](architecture.md)).

This page is made from the code by `python -m vllm_blend.models_page > docs/models.md`.

## Architectures

`architectures` in config.json has one of these names. All of them blend, cache prefixes, speculate and share their
layers among ranks. A layer that sees a **window** shorter than `max_model_len` excludes KV-Compress (`enable_kvc`) and
moving chunks while decoding (`offload_mode`), which say so at start. So do attention **sinks**, which the attention
backends `cpu` and `torch_native` know and the others refuse by name (`auto` takes one that knows them). Cascade
attention leaves layers with either to the backend. **FP8** is `quantization="fp8"`, on a GPU that has its products.

| architecture | what it is | window | sinks | FP8 | `finetune` |
|---|---|---|---|---|---|
"""

_FORMATS = f"""
## Weights

`*.safetensors`, in one file or several; else `pytorch_model*.bin`, of which tensors are read and nothing is run
(`weights_only`). Quantized checkpoints are known by `quantization_config.quant_method` in config.json. Other methods
and options are refused, naming the field.

**On a CPU, linear layers keep 4-bit integers as they are**: in groups of a multiple of 16 inputs that lie together (no
`desc_act` with an order of its own), in layers of a multiple of 32 inputs and 16 outputs, with the compiled kernels and
one rank. The numbers are those of the dequantized model, to the bit. 12 layers of Qwen3-0.6B's shape, in groups of 128,
take 94 MiB instead of 360 in bfloat16. Products with them unpack the weights each time, which costs some speed where
there is AMX: `dequantize_weights=True` dequantizes them at load.

**On a GPU, linear layers of a bfloat16 model keep them too**, from compute capability 8.0 on: in groups of a multiple
of 32 inputs that lie together, in layers of a multiple of 32 inputs and 8 outputs, and on one rank. AWQ checkpoints
mostly name float16 in config.json, so give `dtype="bfloat16"`. PyTorch's own kernel multiplies up to {KERNEL_ROWS}
rows, as in decoding; for more rows one matrix at a time is written out in bfloat16, in memory that is set aside at
start. That kernel takes scales and zero points in bfloat16 only: rounded so, a weight is off by up to a tenth of the
step between two numbers, beside the rounding of bfloat16 itself. While a model loads, no more than one layer's numbers
are there unpacked.

All else is **dequantized at load**, and takes the memory of an unquantized model: 4-bit layers that do not fit the
above, experts, models in float16 and float32 on a GPU, everything on several ranks, and other formats. A warning names
the matrices and the reason.

| `quant_method` | matrices are stored as | at load | with `quantization="fp8"` |
|---|---|---|---|
"""

_GGUF = """
## GGUF

    pip install 'vllm-blend[gguf]'
    vllm-blend serve /models/Qwen3-8B-Q8_0.gguf
    vllm-blend serve Qwen/Qwen3-8B-GGUF:Q8_0          # a file of a repository, by its type or its name

`model` may be the path of a GGUF file of version 2 or 3, or name one of a repository on the Hub; of a file in several
parts give the first (`-00001-of-00003.gguf`). It is enough: **config, tokenizer, chat template and end tokens come from
the file's metadata**.

**On a CPU, quantized matrices stay as they are**, those of linear layers, experts, the embedding and the output: Q4_0,
Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K, with the compiled kernels and one rank. They are read once, into bands of
16 rows whose numbers lie side by side, and take the bytes that they have in the file. Up to 32 rows, as in decoding,
are multiplied by the numbers themselves: activations are not rounded to 8 bits, as in llama.cpp, because the matrix
takes longer to arrive from memory than its numbers take to unpack. For more rows a stretch of the matrix at a time is
unpacked to the activations' dtype, for torch's product. `dequantize_weights=True` dequantizes all at load.

Other types that the package `gguf` can dequantize (among them the MXFP4 of gpt-oss' experts), and everything on a GPU
or several ranks, are **dequantized at load**, matrix by matrix. A warning says so, and what memory they take. The
families are compared with the models from which the test files are written, and some with `transformers`' reader of
GGUF, too. Other architectures are refused.

| `general.architecture` | architecture |
|---|---|
"""

_LATER = """
A `llama` with experts is `MixtralForCausalLM`, and a `mistral3` that scales its queries `Ministral3ForCausalLM`. RoPE's
scaling is read as `linear` (also of a factor without a type, as in llama.cpp), `yarn` and Phi-3's `longrope`, and as
that of Llama 3.1 and later from the factors that a file has (`rope_freqs.weight`), which `transformers` 5.23 leaves
out. `dtype="auto"` on a GPU is float16 for F16 and quantized types, but bfloat16 for Gemma 3 and gpt-oss, whose
activations leave float16's range; on a CPU it is bfloat16 if the processor multiplies that, as for any checkpoint of 16
bits, and float32 otherwise. Metadata that would change the model and are not supported are refused by name.
`transformers` may know what is refused here, and `vllm-blend finetune` trains no GGUF files. To convert one:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

whole = GgufConfig(dequantize=True)
AutoModelForCausalLM.from_pretrained(path, gguf_file=name, quantization_config=whole).save_pretrained(new_path)
AutoTokenizer.from_pretrained(path, gguf_file=name).save_pretrained(new_path)
```

**The tokenizer** is byte-level BPE or SentencePiece, and gives the ids of the model's published `tokenizer.json`.
Text is split by the name of the file's pre-tokenizer (`tokenizer.ggml.pre`); an unknown name is refused. The ids differ
from those of `transformers`' conversion of the same file by what that leaves out: the normal form NFC of Qwen's text,
the single digits of SmolLM and Granite, DeepSeek's splits, and the space with which Llama 2's text between special
tokens begins. Where a converter has lost something, give `tokenizer`: the model's own directory or Hub id, or another
GGUF file.

**End tokens** are those of the file (`eos`, `eot`, `eom`), special tokens with the usual names (`<|im_end|>`,
`<end_of_turn>`, `<|eot_id|>`, ...), and the one that the chat template writes after an answer. If `tokenizer` is a
directory or Hub id with a `generation_config.json`, that counts instead of names and template, together with its
sampling settings.

## Not yet

- **Multi-head latent attention (DeepSeek-V2, V3 and R1).** Its cache holds one compressed vector for all heads, and
  beside it a small key that alone is rotated. Chunk KV here is K and V of each KV head, of one size: the stores'
  format, placing, the selectors that compare K or V, and every attention kernel build on that. Expanding the vector to
  K and V of V3's 128 heads (40,960 numbers a token and layer, instead of 576) would run, with a cache 71 times as large
  as the model was made for. So it waits for a cache layout, and a rotation, of its own.
- Images and audio: only the text of multimodal models is served.
"""


def models_page() -> str:
    """Return the page: a table of architectures, one of weight formats, and one of the families of GGUF files."""
    return (
        _INTRODUCTION + "".join(_architectures()) + _FORMATS + "".join(_formats()) + _GGUF + "".join(_gguf()) + _LATER
    )


def _architectures() -> Iterator[str]:
    model_types = {name: kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if isinstance(name, str)}
    for name in sorted(MODEL_REGISTRY):
        model = MODEL_REGISTRY[name]
        assert issubclass(model, DecoderForCausalLM)
        is_trained = model_types.get(name) in MODEL_TYPES and not issubclass(model, TextPart)
        cells = [f"`{name}`", model.serves, model.windows]
        cells += ["yes" if model.has_sinks else "", _yes(model.takes_quantization), _yes(is_trained)]
        yield f"| {' | '.join(cells)} |\n"


def _formats() -> Iterator[str]:
    for name in sorted(WEIGHT_FORMATS):
        kind = WEIGHT_FORMATS[name]
        kept = (
            "taken over where scales are of rows or matrices, else quantized anew"
            if kind.keeps_fp8
            else "quantized anew"
        )
        at_load = "4 bits stay" if kind.keeps_int4 else "dequantized"
        yield f"| `{name}` | {kind.stores} | {at_load} | {kept} |\n"


def _gguf() -> Iterator[str]:
    for name in sorted(GGUF_FAMILIES):
        yield f"| `{name}` | `{GGUF_FAMILIES[name].architecture}` |\n"


def _yes(value: bool) -> str:
    return "yes" if value else "refused"


if __name__ == "__main__":
    print(models_page(), end="")
