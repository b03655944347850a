# vLLM with the connector, for prefill and decode engines. From the root of the source tree:
#
#   docker build -f deploy/image/vllm.Dockerfile -t kvlease-vllm:0.1.0 .
#
# vLLM's own requirements are held where they are: kvlease needs few packages, and no version that vLLM does not allow.
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0
FROM ${VLLM_IMAGE}
ENV UV_NO_CACHE=1
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY proto proto
COPY registry registry
COPY connector connector
COPY router router
RUN uv pip freeze --system >/tmp/held.txt \
    && uv pip install --system --constraint /tmp/held.txt . \
    && rm /tmp/held.txt
WORKDIR /
