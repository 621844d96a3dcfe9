"""Errors, text, files and figures, for every other package. It imports none of them.

Begin with ``errors.py``: everything that we raise on purpose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtune_adaptive.common.lazy import interface

if TYPE_CHECKING:
    from torchtune_adaptive.common import arguments, durable, ending, launcher, network, plots
    from torchtune_adaptive.common.announce import announce
    from torchtune_adaptive.common.cache import (
        Cache,
        cache_folder,
        cached_files,
        keep_private,
        libraries,
        package_fingerprint,
        user_cache,
        versions_of,
    )
    from torchtune_adaptive.common.document import (
        Block,
        Drawing,
        Gallery,
        Listing,
        Paragraph,
        Table,
        Verbatim,
        as_markdown,
        as_page,
        as_text,
    )
    from torchtune_adaptive.common.durable import Damaged, Manifest, atomically
    from torchtune_adaptive.common.ending import (
        another_rank_has_failed,
        end,
        end_if_in_vain,
        explain,
        say,
    )
    from torchtune_adaptive.common.errors import (
        AdaptiveBatchingError,
        BatchIncreaseError,
        CheckpointError,
        ConfigError,
        EmptyTrial,
        NoPrediction,
        NoProgress,
        NothingFits,
        NothingToLearn,
        OutOfMemoryElsewhere,
        RankLost,
        Stopped,
        TrainingOutOfMemory,
        UnsupportedVersion,
        UsageError,
    )
    from torchtune_adaptive.common.folder_lock import FolderInUse, FolderLock
    from torchtune_adaptive.common.largest import largest
    from torchtune_adaptive.common.lazy import interface
    from torchtune_adaptive.common.named_files import saving_through
    from torchtune_adaptive.common.number_rows import packed_rows, unpacked_rows
    from torchtune_adaptive.common.own_folder import make_own_folder, remove_unused, use_folder
    from torchtune_adaptive.common.tested_versions import check_versions
    from torchtune_adaptive.common.text import (
        AMOUNT_OF_MEMORY,
        amount_of_memory,
        bytes_of,
        counted,
        duration,
        human_bytes,
        listed,
        not_essential,
        parse_memory,
        printable,
        table,
    )
    from torchtune_adaptive.common.yaml_files import load_yaml, require_bounded
else:
    __getattr__, __dir__, __all__ = interface(__name__)
