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
    /// Within each host first, then between hosts: as few bytes between hosts as can be.
    Hierarchical,
    /// A word to ranks ever farther, which is how barriers spread.
    Dissemination,
    /// Nothing is sent: each rank sums one part where it lies, for all, in memory that all see.
    InPlace,
}

impl Algorithm {
    /// Those that can all-reduce.
    pub const OF_ALL_REDUCE: [Algorithm; 6] = [
        Algorithm::Direct,
        Algorithm::Ring,
        Algorithm::Halving,
        Algorithm::Doubling,
        Algorithm::Tree,
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
    /// So many bytes a rank are few, or many, against what is exchanged directly between so many ranks.
    UpTo {
        bytes: usize,
        ranks: usize,
        limit: usize,
    },
    Above {
        bytes: usize,
        ranks: usize,
        limit: usize,
    },
    /// All ranks see the memory.
    Seen,
    /// Ranks share hosts, but not all of them one.
    Hosts {
        ranks: usize,
        hosts: usize,
    },
}

/// Up to this many bytes in all are exchanged directly: one round of latency counts for more than the bytes.
const DIRECT_BYTES: usize = 128 << 10;

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
        match asked {
            Some(algorithm) if topology.ranks() > 1 => Choice { algorithm, why: Why::Asked },
            _ => Choice::by_hosts(topology)
                .unwrap_or_else(|| Choice::by_bytes(bytes, topology.ranks(), Algorithm::Ring)),
        }
    }

    /// For a reduction to one rank.
    pub(super) fn reduce(bytes: usize, topology: &Topology) -> Choice {
        Choice::all_reduce(bytes, topology, None)
    }

    /// For a broadcast.
    pub(super) fn broadcast(topology: &Topology) -> Choice {
        Choice::by_hosts(topology).unwrap_or(Choice::only(Algorithm::Tree))
    }

    /// For an all-gather or a reduce-scatter over so many bytes in all.
    pub(super) fn of_parts(bytes: usize, topology: &Topology, small: Algorithm) -> Choice {
        let ranks = topology.ranks();
        let choice = Choice::by_bytes(bytes, ranks, Algorithm::Ring);
        if choice.algorithm == Algorithm::Direct { Choice { algorithm: small, ..choice } } else { choice }
    }

    /// Where it is best to stay within a host as long as one can.
    fn by_hosts(topology: &Topology) -> Option<Choice> {
        let (ranks, hosts) = (topology.ranks(), topology.hosts());
        let why = Why::Hosts { ranks, hosts };
        (1 < hosts && hosts < ranks).then_some(Choice { algorithm: Algorithm::Hierarchical, why })
    }

    fn by_bytes(bytes: usize, ranks: usize, large: Algorithm) -> Choice {
        if ranks == 1 {
            return Choice { algorithm: Algorithm::Direct, why: Why::Alone };
        }
        let limit = DIRECT_BYTES / ranks;
        if bytes <= limit {
            Choice { algorithm: Algorithm::Direct, why: Why::UpTo { bytes, ranks, limit } }
        } else {
            Choice { algorithm: large, why: Why::Above { bytes, ranks, limit } }
        }
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
            Why::UpTo { bytes, ranks, limit } => {
                write!(f, "{bytes} bytes between {ranks} ranks, up to {limit}")
            }
            Why::Above { bytes, ranks, limit } => {
                write!(f, "{bytes} bytes between {ranks} ranks, above {limit}")
            }
            Why::Hosts { ranks, hosts } => write!(f, "{ranks} ranks on {hosts} hosts"),
        }
    }
}
