"""Pinned memory against reuse: the same chats under each way of keeping leases.

The replay drives the connector's own lease holder; what stock vLLM would pin is counted beside it. The chats' times
and lengths are in `conversations.csv`, which says where they are from.
"""
