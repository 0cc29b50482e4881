"""Certificates made by the ``openssl`` program: an authority, and what it has signed."""

import subprocess
from pathlib import Path

from llamarl.transports.network import TlsFiles

__all__ = ["signed"]


def signed(folder: Path) -> TlsFiles:
    """Files in a new folder: a certificate, its key, and the authority that signed it, of this folder alone."""
    folder.mkdir()
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=folder)

    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority")
    openssl("req", *curve[:-2], "-keyout", "own.key", "-out", "own.csr", "-subj", "/CN=host")
    sign = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2"]
    openssl("x509", "-req", "-in", "own.csr", *sign, "-out", "own.pem")
    return TlsFiles(certificate=folder / "own.pem", private_key=folder / "own.key", authority=folder / "ca.pem")
