"""Asynchronous RL of Wordle: a trainer, a bucket, rollout replicas and an environment, each a process of its own."""
