# syntax=docker/dockerfile:1
# hadolint global ignore=DL3006,DL3008
# The server in an image, for CPUs by default; docs/deploy.md says how to run it, and what of this was tried.
#
#   docker build -t vllm-blend .
#   docker build -t vllm-blend:cuda --build-arg CUDA=1 --build-arg COMPILER_IMAGE=docker.io/nvidia/cuda:13.0.2-devel-ubuntu24.04 \
#     --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
#
# PYTHON_IMAGE    what the image is made from: Debian with a python of 3.11 or newer
# COMPILER_IMAGE  Debian or Ubuntu in which the kernels are compiled; with CUDA=1 it needs nvcc. Nothing of it is in the
#                 image: torch brings CUDA's libraries along
# TORCH_INDEX     where torch comes from
# EXTRAS          of the package: server has what the server needs, store the clients of Redis and of object stores
ARG PYTHON_IMAGE=docker.io/library/python:3.13-slim-trixie
ARG COMPILER_IMAGE=${PYTHON_IMAGE}

# The wheel, with its compiled kernels, fits every Python 3 (see setup.py).
FROM ${COMPILER_IMAGE} AS wheel
ARG CUDA=0
ENV VLLM_BLEND_BUILD_CUDA=${CUDA}
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY setup.py pyproject.toml MANIFEST.in README.md LICENSE CHANGELOG.md CITATION.cff ./
COPY csrc csrc
COPY vllm_blend vllm_blend
RUN python3 -m venv /build \
    && /build/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${PYTHON_IMAGE} AS installed
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=server,store
COPY requirements.txt /tmp/requirements.txt
RUN python3 -m venv /opt/vllm-blend \
    && /opt/vllm-blend/bin/pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" --requirement /tmp/requirements.txt
COPY --from=wheel /wheels /tmp/wheels
RUN wheel="$(ls /tmp/wheels/*.whl)" \
    && /opt/vllm-blend/bin/pip install --no-cache-dir "${wheel}[${EXTRAS}]"

FROM ${PYTHON_IMAGE}
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --home-dir /home/vllm-blend --create-home vllm-blend \
    && install --directory --owner=vllm-blend --group=vllm-blend /models /chunks
COPY --from=installed /opt/vllm-blend /opt/vllm-blend
ENV PATH=/opt/vllm-blend/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/models/huggingface
USER 10001:10001
WORKDIR /home/vllm-blend
# Weights, and stored chunks if --chunk-store-path names this folder.
VOLUME ["/models", "/chunks"]
EXPOSE 8000
# Requests wait while the model loads for the first time, so the first checks are let fail. With --port or TLS, give
# docker run a --health-cmd of your own.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready', timeout=4)"]
ENTRYPOINT ["vllm-blend", "serve", "--host", "0.0.0.0"]
CMD ["--help"]
