//! How many blocks of how many threads a launch has: a pure function of sizes.
//!
//! Grids have one dimension. Every kernel loops with the step of its grid, so a grid may be smaller than its work; it never is
//! larger, and never empty. The number of threads of a block decides in which order a block adds up, so it depends on sizes
//! alone, not on the device.

/// Threads of a block that works element by element.
const THREADS: u32 = 256;
/// Threads that run in step; every block is made of whole warps, which reductions rely on.
const WARP: u32 = 32;
/// Elements of a row that each thread of a block should have to itself, before the block has more threads.
const PER_THREAD: u64 = 4;
/// Blocks of a grid along its first dimension, as CUDA allows.
const MOST_BLOCKS: u64 = (1 << 31) - 1;

/// Bytes of neighbouring columns that a block of a kernel of [`Work::Columns`] takes, of one piece.
pub const LINE: u64 = 128;
/// The same of [`Work::WholeColumns`], of all rows.
pub const SECTOR: u64 = 32;
/// Rows and columns of the tiles of [`Work::Tiles`].
pub const TILE: u64 = 32;
/// Threads of a block of a kernel of [`Work::Pieces`].
const THREADS_OF_PIECE: u32 = 128;

/// In which pieces a kernel shares out its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// See [`Work::Elements`].
    Elements,
    /// See [`Work::Rows`].
    Rows,
    /// See [`Work::Bands`].
    Bands,
    /// See [`Work::Columns`].
    Columns,
    /// See [`Work::WholeColumns`].
    WholeColumns,
    /// See [`Work::Tiles`].
    Tiles,
    /// See [`Work::Pieces`].
    Pieces,
}

/// What there is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// So many elements, a thread each, or fewer threads that take some neighbours each.
    Elements(u64),
    /// So many rows, a block each, whose threads share out the row.
    Rows {
        /// How many.
        rows: u64,
        /// Elements of each.
        width: u64,
    },
    /// Rows of up to [`Work::MOST_IN_BAND`] elements, cut into bands of neighbours: a block each, whose threads have [`Work::IN_BAND`]
    /// neighbours each of every row.
    Bands {
        /// How many bands.
        bands: u64,
        /// Elements of a row.
        width: u64,
    },
    /// A table of which something is found column by column and piece by piece: a block takes columns of [`LINE`] bytes of one piece.
    Columns {
        /// Pieces that the rows are cut into.
        pieces: u64,
        /// Columns.
        width: u64,
        /// Bytes of an element.
        bytes: u64,
    },
    /// The same of all rows at once: a block takes columns of [`SECTOR`] bytes.
    WholeColumns {
        /// Columns.
        width: u64,
        /// Bytes of an element.
        bytes: u64,
    },
    /// Matrices, cut into tiles of [`TILE`] x [`TILE`], a block each.
    Tiles {
        /// How many matrices.
        matrices: u64,
        /// Rows of each.
        rows: u64,
        /// Columns of each.
        columns: u64,
    },
    /// So many pieces of a kind that the kernel knows, a block of four warps each.
    Pieces(u64),
}

/// The grid of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Blocks, along the first dimension.
    pub blocks: u32,
    /// Threads of each block, along the first dimension.
    pub threads: u32,
}

impl Work {
    /// Neighbours of a thread in a row of a band.
    pub const IN_BAND: u64 = 8;
    /// The most elements of a row of a band.
    pub const MOST_IN_BAND: u64 = THREADS as u64 * Work::IN_BAND;

    /// How it is shared out.
    pub const fn share(self) -> Share {
        match self {
            Work::Elements(_) => Share::Elements,
            Work::Rows { .. } => Share::Rows,
            Work::Bands { .. } => Share::Bands,
            Work::Columns { .. } => Share::Columns,
            Work::WholeColumns { .. } => Share::WholeColumns,
            Work::Tiles { .. } => Share::Tiles,
            Work::Pieces(_) => Share::Pieces,
        }
    }

    /// Threads of a block.
    fn threads(self) -> u32 {
        match self {
            Work::Rows { width, .. } => {
                let warps = width.div_ceil(PER_THREAD * u64::from(WARP)).clamp(1, u64::from(THREADS / WARP));
                warps as u32 * WARP
            }
            Work::Bands { width, .. } => {
                let warps =
                    width.div_ceil(Work::IN_BAND * u64::from(WARP)).clamp(1, u64::from(THREADS / WARP));
                warps as u32 * WARP
            }
            Work::Pieces(_) => THREADS_OF_PIECE,
            _ => THREADS,
        }
    }

    /// How many blocks would do all of it without a loop. Beyond what 64 bits count, as many as they do.
    fn blocks(self) -> u64 {
        match self {
            Work::Elements(n) => n.div_ceil(u64::from(THREADS)),
            Work::Rows { rows, .. } => rows,
            Work::Bands { bands, .. } => bands,
            Work::Pieces(n) => n,
            Work::Columns { pieces, width, bytes } => pieces.saturating_mul(width.div_ceil(LINE / bytes)),
            Work::WholeColumns { width, bytes } => width.div_ceil(SECTOR / bytes),
            Work::Tiles { matrices, rows, columns } => {
                matrices.saturating_mul(rows.div_ceil(TILE)).saturating_mul(columns.div_ceil(TILE))
            }
        }
    }

    /// The grid for it, of at most `most_blocks` blocks (a few times as many as the device has multiprocessors); none where there
    /// is nothing to do, since a grid can't be empty.
    pub fn geometry(self, most_blocks: u32) -> Option<Geometry> {
        let most = u64::from(most_blocks).clamp(1, MOST_BLOCKS);
        let blocks = self.blocks().min(most) as u32;
        (blocks > 0).then(|| Geometry { blocks, threads: self.threads() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: [u64; 14] =
        [0, 1, 2, 31, 32, 33, 127, 255, 256, 257, 65_537, 1 << 31, u32::MAX as u64 + 1, 1 << 60];

    fn all_work() -> Vec<Work> {
        let mut all: Vec<Work> = [SIZES.map(Work::Elements), SIZES.map(Work::Pieces)].concat();
        for a in SIZES {
            all.extend([2, 4].map(|bytes| Work::WholeColumns { width: a, bytes }));
            for b in SIZES {
                all.push(Work::Rows { rows: a, width: b });
                all.push(Work::Bands { bands: a, width: b });
                all.extend([2, 4].map(|bytes| Work::Columns { pieces: a, width: b, bytes }));
                all.extend(SIZES.map(|c| Work::Tiles { matrices: c, rows: a, columns: b }));
            }
        }
        all
    }

    #[test]
    fn grids_keep_to_the_limits_of_cuda() {
        for work in all_work() {
            for most in [0, 1, 7, 4096, u32::MAX] {
                let Some(Geometry { blocks, threads }) = work.geometry(most) else { continue };
                assert!(blocks >= 1 && u64::from(blocks) <= MOST_BLOCKS, "{work:?}: {blocks} blocks");
                assert!(blocks <= most.max(1), "{work:?}: {blocks} blocks, of at most {most}");
                assert!(
                    (WARP..=1024).contains(&threads) && threads.is_multiple_of(WARP),
                    "{work:?}: {threads}"
                );
            }
        }
    }

    #[test]
    fn only_nothing_is_not_launched() {
        for work in all_work() {
            let nothing = match work {
                Work::Elements(n) | Work::Pieces(n) => n == 0,
                // A row without elements has a sum, too.
                Work::Rows { rows, .. } => rows == 0,
                Work::Bands { bands, .. } => bands == 0,
                Work::Columns { pieces, width, .. } => pieces == 0 || width == 0,
                Work::WholeColumns { width, .. } => width == 0,
                Work::Tiles { matrices, rows, columns } => matrices == 0 || rows == 0 || columns == 0,
            };
            assert_eq!(work.geometry(1024).is_none(), nothing, "{work:?}");
        }
    }

    #[test]
    fn no_block_is_idle_and_what_fits_is_done_at_once() {
        for n in 1..2000 {
            let Geometry { blocks, threads } = Work::Elements(n).geometry(u32::MAX).unwrap();
            let (blocks, threads) = (u64::from(blocks), u64::from(threads));
            assert!(blocks * threads >= n && (blocks - 1) * threads < n, "{n}: {blocks} x {threads}");
        }
    }

    #[test]
    fn the_order_of_a_sum_depends_on_sizes_alone() {
        for work in all_work() {
            let threads = [1, 132, u32::MAX].map(|most| work.geometry(most).map(|g| g.threads));
            assert!(threads.iter().all(|t| *t == threads[0]), "{work:?}: {threads:?}");
        }
    }
}
