# syntax=docker/dockerfile:1
# The control plane, CPU training and tests, without a GPU.
#
#   docker build -f docker/cpu.Dockerfile -t sfm:cpu .
#   docker run -e SFM_HOST=0.0.0.0 -e SFM_TOKEN=... -p 127.0.0.1:8100:8100 -v sfm-state:/home/sfm/.sfm sfm:cpu
#
#   docker build -f docker/cpu.Dockerfile --build-arg EXTRAS=dev -t sfm:dev .
#   docker run -v "$PWD:/src:ro" -w /src sfm:dev python -m pytest -p no:cacheprovider
ARG PYTHON_VERSION=3.11

FROM python:${PYTHON_VERSION}-slim-bookworm
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# PyPI's torch would bring gigabytes of CUDA libraries; this index has the CPU wheels.
ARG TORCH_VERSION=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /opt/sfm
COPY constraints.txt ./
RUN python -m venv /opt/venv \
 && /opt/venv/bin/pip install --no-cache-dir --constraint constraints.txt --index-url "${TORCH_INDEX}" "torch==${TORCH_VERSION}"
ENV PATH=/opt/venv/bin:${PATH}

ARG EXTRAS=train,service
COPY pyproject.toml README.md ./
COPY sfm sfm
COPY service service
RUN pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]"

RUN useradd --uid 1000 --create-home --shell /bin/bash sfm \
 && install -d -o sfm -g sfm -m 700 /home/sfm/.sfm
ENV HOME=/home/sfm \
    SFM_STATE_DIR=/home/sfm/.sfm
WORKDIR /home/sfm
USER 1000:1000

ARG REVISION=unknown
LABEL org.opencontainers.image.title="sfm-cpu" \
      org.opencontainers.image.description="Seismic foundation model training on Ray: control plane and CPU workers" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}"

EXPOSE 8100
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s --retries=3 \
  CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ.get('SFM_PORT', '8100') + '/healthz', timeout=3)"]
CMD ["sfm", "serve"]
