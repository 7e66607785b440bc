"""Processes that train one model together, and what each of them would publish of it."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.tensor import DTensor

from weightcast.format.boxes import Place
from weightcast.format.codec import decode_change
from weightcast.format.spec import TensorTable
from weightcast.format.tensors import Bits
