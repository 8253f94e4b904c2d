"""pip's installation report on stdin -> one warning, with the size, if it is about to fetch torch's CUDA libraries.

Does not fetch anything: it asks for the sizes alone.
"""

import json
import sys
import urllib.request


def main() -> None:
    packages = json.load(sys.stdin)["install"]
    cuda = [p for p in packages if p["metadata"]["name"].lower().startswith(("nvidia-", "cuda-", "triton"))]
    if not cuda:
        return
    urls = [p["download_info"]["url"] for p in packages]
    sizes = [size(url) for url in urls]
    total = "several GB" if None in sizes else f"{sum(filter(None, sizes)) / 1e9:.1f} GB"
    print(
        f"This package index has only torch's CUDA build: {len(cuda)} CUDA packages, {total} to download in all.\n"
        "It works without a GPU too. To avoid it, press Ctrl-C and set PIP_EXTRA_INDEX_URL to the index of CPU builds "
        "that torch's installation page names."
    )


def size(url: str) -> "int | None":
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=10) as answer:
            return int(answer.headers["Content-Length"])
    except (OSError, TypeError, ValueError):
        return None


if __name__ == "__main__":
    main()
