//! Which algorithm carries an operation out, and why: a pure function of the operation, its bytes, and which ranks share hosts.
//!
//! All ranks must choose alike, so nothing is asked here that one rank could see otherwise than another, such as how many
//! cores its host has. Reasons are numbers until somebody wants to read them.

use crate::topology::Topology;
use std::fmt;

/// How ranks carry an operation out together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Algorithm {
    /// Everyone sends what it has straight to everyone who needs it, in one round.
    Direct,
    /// Parts go round, from each rank to the next: as few bytes as can be, in as many rounds as there are other ranks.
    Ring,
    /// Parts are exchanged with ranks ever nearer and gathered the same way back: as few bytes as the ring sends, in fewer rounds.
    Halving,
    /// Whole buffers are exchanged with ranks ever farther: few rounds, many bytes.
    Doubling,
    /// Up a binomial tree to one rank, and down again: as few messages as can be.
    Tree,
    /// Everyone sends its whole buffer to one rank, and is told the result: two messages a rank, in two rounds.
    Star,
    /// Within each host first, then between hosts: as few bytes between hosts as can be.
    Hierarchical,
    /// A word to ranks ever farther, which is how barriers spread.
    Dissemination,
    /// Nothing is sent: each rank sums one part where it lies, for all, in memory that all see.
    InPlace,
}

impl Algorithm {
    /// Those that can all-reduce.
    pub const OF_ALL_REDUCE: [Algorithm; 7] = [
        Algorithm::Direct,
        Algorithm::Ring,
        Algorithm::Halving,
        Algorithm::Doubling,
        Algorithm::Tree,
        Algorithm::Star,
        Algorithm::Hierarchical,
    ];

    /// The way to all-reduce that a user asks for by this word; none for `auto`. The error says which words there are.
    pub fn asked(word: &str) -> Result<Option<Algorithm>, String> {
        let of_all_reduce = Algorithm::OF_ALL_REDUCE.into_iter();
        let found = of_all_reduce.clone().find(|algorithm| algorithm.name() == word);
        if found.is_none() && word != "auto" {
            let names: Vec<&str> = of_all_reduce.map(Algorithm::name).collect();
            return Err(format!("must be auto, {}", names.join(", ")));
        }
        Ok(found)
    }

    fn name(self) -> &'static str {
        match self {
            Algorithm::Direct => "direct",
            Algorithm::Ring => "ring",
            Algorithm::Halving => "halving",
            Algorithm::Doubling => "doubling",
            Algorithm::Tree => "tree",
            Algorithm::Star => "star",
            Algorithm::Hierarchical => "hierarchical",
            Algorithm::Dissemination => "dissemination",
            Algorithm::InPlace => "in place",
        }
    }

    /// Its number in messages; 0 is that of none.
    pub(crate) fn code(self) -> u8 {
        self as u8 + 1
    }

    pub(crate) fn of_code(code: u8) -> Option<Algorithm> {
        let others = [Algorithm::Dissemination, Algorithm::InPlace];
        Algorithm::OF_ALL_REDUCE.into_iter().chain(others).find(|algorithm| algorithm.code() == code)
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// An algorithm, and why it was chosen: as in "ring: 4194304 bytes between 2 ranks, above 65536".
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Choice {
    /// What was chosen.
    pub algorithm: Algorithm,
    why: Why,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Why {
    Alone,
    /// Somebody wants this one.
    Asked,
    /// There is no other for the operation.
    Only,
    /// That is best for so many bytes a rank between so many ranks: more than the first limit, if there is one, and no more than
    /// the second.
    Size {
        bytes: usize,
        ranks: usize,
        above: Option<usize>,
        up_to: Option<usize>,
    },
    /// All ranks see the memory.
    Seen,
    /// Ranks share hosts, but not all of them one.
    Hosts {
        ranks: usize,
        hosts: usize,
    },
}

/// What is best for buffers up to which size, the smallest first, and for larger ones.
struct Sizes {
    up_to: &'static [(Algorithm, usize)],
    large: Algorithm,
}

/// How the ranks of one host, or one rank each of several hosts, all-reduce. Measured with 2 to 8 ranks that share two cores,
/// where messages and wakings count: by way of one rank there are as few as can be, a tree has as few and shares the sums out, and
/// from some size on only the bytes count. Between hosts it is the rounds that count before the bytes do.
fn all_reduce_sizes(ranks: usize, hosts: usize) -> Sizes {
    use Algorithm::{Direct, Doubling, Halving, Ring, Star, Tree};
    match (ranks, hosts) {
        (..=2, _) => Sizes { up_to: &[(Direct, 64 << 10)], large: Ring },
        (3 | 4, 1) => Sizes { up_to: &[(Doubling, 8 << 10), (Tree, 128 << 10)], large: Halving },
        (_, 1) => Sizes { up_to: &[(Star, 8 << 10), (Tree, 128 << 10)], large: Halving },
        _ => Sizes { up_to: &[(Doubling, 16 << 10)], large: Halving },
    }
}

/// Up to how many bytes of all parts messages count for more than bytes, where each part is for one rank or comes from one.
pub(crate) const SMALL_PARTS: usize = 64 << 10;
/// How parts are gathered at, or summed for, those who are to have them; the bytes are those of all parts.
const GATHER: Sizes = Sizes { up_to: &[(Algorithm::Direct, SMALL_PARTS)], large: Algorithm::Ring };
const REDUCE_SCATTER: Sizes = Sizes { up_to: &[(Algorithm::Halving, SMALL_PARTS)], large: Algorithm::Ring };
/// How buffers are summed for one rank.
const REDUCE: Sizes = Sizes { up_to: &[(Algorithm::Direct, 32 << 10)], large: Algorithm::Ring };

impl Choice {
    /// For an operation that is always carried out alike.
    pub(crate) fn only(algorithm: Algorithm) -> Choice {
        Choice { algorithm, why: Why::Only }
    }

    /// For an all-reduce in memory that all ranks see.
    pub(crate) fn in_place() -> Choice {
        Choice { algorithm: Algorithm::InPlace, why: Why::Seen }
    }

    /// For an all-reduce of so many bytes a rank; `asked` is what somebody wants instead.
    pub(super) fn all_reduce(bytes: usize, topology: &Topology, asked: Option<Algorithm>) -> Choice {
        let (ranks, hosts) = (topology.ranks(), topology.hosts());
        match asked {
            Some(algorithm) if ranks > 1 => Choice { algorithm, why: Why::Asked },
            _ => Choice::by_hosts(topology)
                .unwrap_or_else(|| Choice::by_size(bytes, ranks, &all_reduce_sizes(ranks, hosts))),
        }
    }

    /// For a reduction to one rank.
    pub(super) fn reduce(bytes: usize, topology: &Topology) -> Choice {
        Choice::by_hosts(topology).unwrap_or_else(|| Choice::by_size(bytes, topology.ranks(), &REDUCE))
    }

    /// For a broadcast.
    pub(super) fn broadcast(topology: &Topology) -> Choice {
        Choice::by_hosts(topology).unwrap_or(Choice::only(Algorithm::Tree))
    }

    /// For an all-gather of so many bytes in all.
    pub(super) fn all_gather(bytes: usize, topology: &Topology) -> Choice {
        Choice::by_size(bytes, topology.ranks(), &GATHER)
    }

    /// For a reduce-scatter of so many bytes in all.
    pub(super) fn reduce_scatter(bytes: usize, topology: &Topology) -> Choice {
        Choice::by_size(bytes, topology.ranks(), &REDUCE_SCATTER)
    }

    /// Where it is best to stay within a host as long as one can.
    fn by_hosts(topology: &Topology) -> Option<Choice> {
        let (ranks, hosts) = (topology.ranks(), topology.hosts());
        let why = Why::Hosts { ranks, hosts };
        (1 < hosts && hosts < ranks).then_some(Choice { algorithm: Algorithm::Hierarchical, why })
    }

    fn by_size(bytes: usize, ranks: usize, sizes: &Sizes) -> Choice {
        if ranks == 1 {
            return Choice { algorithm: Algorithm::Direct, why: Why::Alone };
        }
        let mut above = None;
        for &(algorithm, limit) in sizes.up_to {
            if bytes <= limit {
                return Choice { algorithm, why: Why::Size { bytes, ranks, above, up_to: Some(limit) } };
            }
            above = Some(limit);
        }
        Choice { algorithm: sizes.large, why: Why::Size { bytes, ranks, above, up_to: None } }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.algorithm)?;
        match self.why {
            Why::Alone => write!(f, "there are no other ranks"),
            Why::Asked => write!(f, "asked for"),
            Why::Seen => write!(f, "all ranks see the memory"),
            Why::Only => write!(f, "the only way there is"),
            Why::Size { bytes, ranks, above, up_to } => {
                write!(f, "{bytes} bytes between {ranks} ranks")?;
                above.map_or(Ok(()), |limit| write!(f, ", above {limit}"))?;
                up_to.map_or(Ok(()), |limit| write!(f, ", up to {limit}"))
            }
            Why::Hosts { ranks, hosts } => write!(f, "{ranks} ranks on {hosts} hosts"),
        }
    }
}
