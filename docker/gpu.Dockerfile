# syntax=docker/dockerfile:1
# The image of every node of a GPU cluster: head and workers (Ray wants one Python everywhere).
#
#   docker build -f docker/gpu.Dockerfile -t sfm:gpu .
#
# CUDA base: `devel`, not `runtime`. torch's wheels bring the CUDA libraries they run on, so a `runtime` base would
# carry them twice; what they lack is a compiler, and DeepSpeed compiles its fused kernels at first use with nvcc,
# whose major version must be torch's (13). Ubuntu 24.04, because EFA's packages are built for it; Python comes from
# the same official image as docker/cpu.Dockerfile, because 3.11 is what the tests run and Ubuntu 24.04 has only 3.12.
ARG CUDA_VERSION=13.0.2
ARG PYTHON_VERSION=3.11

FROM python:${PYTHON_VERSION}-slim-bookworm AS python

FROM nvidia/cuda:${CUDA_VERSION}-devel-ubuntu24.04
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# What Python's extension modules link to, a C++ compiler for kernels, and rsync and ssh: `ray up` copies with one
# and the autoscaler on the head reaches workers with the other.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends \
      ca-certificates curl g++ libbz2-1.0 libffi8 liblzma5 libncursesw6 libreadline8t64 libsqlite3-0 libssl3t64 \
      libuuid1 openssh-client rsync zlib1g \
 && rm -rf /var/lib/apt/lists/*
COPY --from=python /usr/local /usr/local
RUN ldconfig && python -c "import bz2, ctypes, lzma, readline, sqlite3, ssl, uuid, zlib"

# EFA: libfabric and rdma-core by AWS's installer (the kernel module is the host's), then the NCCL plug-in, newer
# than the one the installer brings: 1.21 was released for NCCL 2.31 and serves NCCL from 2.17 on (torch brings 2.29).
# A version and its checksum change together; nothing runs before its checksum holds.
ARG EFA_INSTALLER_VERSION=1.42.0
ARG EFA_INSTALLER_SHA256=4114fe612905ee05083ae5cb391a00a012510f3abfecc642d86c9a5ae4be9008
WORKDIR /tmp/efa
# hadolint ignore=DL3008
RUN curl --proto '=https' --tlsv1.2 -fsSLo efa.tar.gz \
      "https://efa-installer.amazonaws.com/aws-efa-installer-${EFA_INSTALLER_VERSION}.tar.gz" \
 && echo "${EFA_INSTALLER_SHA256}  efa.tar.gz" | sha256sum --check --strict \
 && tar -xzf efa.tar.gz --strip-components=1 \
 && apt-get update \
 && ./efa_installer.sh --yes --skip-kmod --skip-limit-conf --no-verify \
 && rm -rf /tmp/efa/* /var/lib/apt/lists/*

ARG AWS_OFI_NCCL_VERSION=1.21.1
ARG AWS_OFI_NCCL_SHA512=ab7aa6b6f2f5117252e7603cf39458ec9b2d03a4bc2d8b36ac61f0b41287bcea3de619ed2d1638b4258694f48380971a2c60a4eac8e230097e80de2bb8e04e75
# hadolint ignore=DL3008,DL3003
RUN curl --proto '=https' --tlsv1.2 -fsSLo ofi.tar.gz \
      "https://github.com/aws/aws-ofi-nccl/releases/download/v${AWS_OFI_NCCL_VERSION}/aws-ofi-nccl-${AWS_OFI_NCCL_VERSION}.tar.gz" \
 && echo "${AWS_OFI_NCCL_SHA512}  ofi.tar.gz" | sha512sum --check --strict \
 && tar -xzf ofi.tar.gz --strip-components=1 \
 && apt-get update \
 && apt-get install -y --no-install-recommends libhwloc-dev libhwloc15 make \
 && ./configure --prefix=/opt/aws-ofi-nccl --with-libfabric=/opt/amazon/efa --with-cuda=/usr/local/cuda \
      --enable-platform-aws --disable-tests \
 && make -j"$(nproc)" install \
 && apt-get purge -y --auto-remove libhwloc-dev make \
 && rm -rf /tmp/efa/* /var/lib/apt/lists/* \
 && cd /opt/aws-ofi-nccl/lib \
 && if [ ! -e libnccl-net.so ]; then ln -s "$(find . -name 'libnccl-net-*.so' -print -quit)" libnccl-net.so; fi \
 && test -e libnccl-net.so

ENV LD_LIBRARY_PATH=/opt/aws-ofi-nccl/lib:/opt/amazon/efa/lib:${LD_LIBRARY_PATH} \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

# torch by itself: the largest layer, and the one that changes least. PyPI's wheels of 2.13 are built for CUDA 13.0.
ARG TORCH_VERSION=2.13.0
WORKDIR /opt/sfm
COPY constraints.txt ./
RUN python -m venv /opt/venv \
 && /opt/venv/bin/pip install --no-cache-dir --constraint constraints.txt "torch==${TORCH_VERSION}"
ENV PATH=/opt/venv/bin:/opt/amazon/efa/bin:${PATH}

# boto3: Ray's autoscaler on the head starts machines with it, and does not bring it.
COPY pyproject.toml README.md ./
COPY sfm sfm
COPY service service
RUN pip install --no-cache-dir --constraint constraints.txt '.[train,service]' boto3 \
 && python -c "import boto3, deepspeed, ray, service, sfm, torch; assert torch.version.cuda.split('.')[0] == '13'"

# User id 1000 is `ubuntu` on the machines: the files that `ray up` mounts belong to it. Ray opens login shells, which
# reset PATH, so PATH is said again in profile.d; and it asks the image for HOME.
RUN userdel --remove ubuntu \
 && useradd --uid 1000 --create-home --shell /bin/bash ray \
 && install -d -o ray -g ray -m 700 /home/ray/.ray /home/ray/.sfm \
 && printf 'export PATH=%s\n' "${PATH}" > /etc/profile.d/sfm.sh
ENV HOME=/home/ray
WORKDIR /home/ray
USER 1000:1000

ARG REVISION=unknown
LABEL org.opencontainers.image.title="sfm-gpu" \
      org.opencontainers.image.description="Seismic foundation model training on Ray: CUDA, EFA, torch, DeepSpeed" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}"

# Under `ray up` the container's own process is an idle shell: whether the node is well, Ray knows better.
HEALTHCHECK NONE
CMD ["bash"]
