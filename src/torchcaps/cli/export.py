"""``torchcaps export``"""

from __future__ import annotations

import argparse
from pathlib import Path

from torchcaps.cli.shared import add_data_folder, add_run_folder, open_run


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run_folder(parser)
    parser.add_argument("--to", required=True, choices=("onnx", "pt2", "safetensors"), help="format of the file")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the file [in the folder 'export' of the run]")
    parser.add_argument(
        "--precision",
        choices=("float32", "float16", "int8"),
        default="float32",
        help="of the stored weights; computation is in float32 [float32]",
    )
    add_data_folder(parser)


def run(arguments: argparse.Namespace) -> None:
    trained = open_run(arguments.run_folder, arguments)
    report = trained.export(
        arguments.out, to=arguments.to, precision=arguments.precision, data_folder=arguments.data_dir
    )
    print(f"wrote {report.path}, {report.bytes / 1e6:.2f} MB")
    kind = "test" if report.real_images else "random"
    print(f"largest difference from the network: {report.largest_difference:.2g} on {report.images} {kind} images")
    if report.no_images:
        print(f"(not on test images: {report.no_images})")
    if report.error_percent is not None:
        before, after = report.error_percent
        print(f"error {before:.2f} % -> {after:.2f} % of {report.test_images:,} test images")
