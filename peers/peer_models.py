"""Write one GGUF model in the formats that the peers need.

    smollm2.Q4_0.gguf  smollm2.Q4_1.gguf                        for llama.cpp; the second is the source
    smollm2.openvino-int8/                                      for OpenVINO GenAI: int8, one scale a row
    smollm2.hf-bf16/                                            for transformers and vLLM: bf16

All have the weights of the same source, dequantised and quantised again, with the source's metadata: the peers differ
in bits, not in the model. A matrix that the source has in 8 bits (the embedding, which is also the output layer) stays
in 8 bits in the GGUF files, as llama.cpp's own quantiser leaves it. It runs in the peers' environment and imports
nothing of Paceline.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.constants import LlamaFileType
from gguf.quants import dequantize, quantize

FILE_TYPES = {
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
    "F16": LlamaFileType.MOSTLY_F16,
}
WRITTEN_BY_WRITER = ("GGUF.", "general.architecture", "general.file_type")


def requantise(*, source: Path, out: Path, kind: str) -> None:
    reader = GGUFReader(source)
    writer = GGUFWriter(out, arch=str(reader.fields["general.architecture"].contents()))
    copy_metadata(reader=reader, writer=writer)
    writer.add_file_type(FILE_TYPES[kind])
    for tensor in reader.tensors:
        bits = kept_bits(given=tensor.tensor_type, wanted=GGMLQuantizationType[kind])
        data = (
            tensor.data if bits == tensor.tensor_type else quantize(dequantize(tensor.data, tensor.tensor_type), bits)
        )
        writer.add_tensor(tensor.name, data, raw_dtype=bits)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def kept_bits(*, given: GGMLQuantizationType, wanted: GGMLQuantizationType) -> GGMLQuantizationType:
    eight = given == GGMLQuantizationType.Q8_0 and wanted != GGMLQuantizationType.F16
    return given if eight or given == GGMLQuantizationType.F32 else wanted


def write_openvino(*, source: Path, out: Path) -> None:
    """Convert an F16 GGUF file by OpenVINO GenAI, and compress its weights by NNCF."""
    import nncf
    import openvino
    import openvino_genai

    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "model.gguf"
        requantise(source=source, out=whole, kind="F16")
        openvino_genai.LLMPipeline(whole, "CPU", enable_save_ov_model=True)
        out.mkdir(parents=True, exist_ok=True)
        model = openvino.Core().read_model(Path(scratch) / "openvino_model.xml")
        small = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)
        openvino.save_model(small, out / "openvino_model.xml", compress_to_fp16=False)
        for part in Path(scratch).glob("openvino_*tokenizer.*"):
            shutil.copy(part, out)


def write_transformers(*, source: Path, out: Path) -> None:
    """Save the model as transformers reads it, without its quantisation config, which transformers cannot save."""
    import torch
    from transformers import AutoModelForCausalLM

    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    kept = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    model = AutoModelForCausalLM.from_config(type(read.config)(**kept))
    model.load_state_dict(read.state_dict())
    model.to(torch.bfloat16).save_pretrained(out)


def copy_metadata(*, reader: GGUFReader, writer: Any) -> None:
    for field in reader.fields.values():
        if field.name.startswith(WRITTEN_BY_WRITER):
            continue
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="the GGUF file to start from (Q4_1)")
    parser.add_argument("--out", type=Path, required=True, help="directory for the files above")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    requantise(source=args.source, out=args.out / "smollm2.Q4_0.gguf", kind="Q4_0")
    shutil.copy(args.source, args.out / "smollm2.Q4_1.gguf")
    write_openvino(source=args.source, out=args.out / "smollm2.openvino-int8")
    write_transformers(source=args.out / "smollm2.Q4_1.gguf", out=args.out / "smollm2.hf-bf16")


if __name__ == "__main__":
    main()
