//! What an operation is, in the header of every message that belongs to it.
//!
//! Two ranks in different operations find out with the first header that goes between them, not by hanging. Ranks that name
//! different roots of one operation may have none to send each other: whoever waits for a while asks the ranks that it waits
//! for whether they understand the operation as it does. How long a message is follows from the operation, so no length from
//! outside is trusted; for messages between two ranks the receiver's length must be the sender's.

use crate::element::{ElementKind, ReduceOp};
use crate::schedule::Algorithm;
use phalanx_wire::Rank;

/// An operation, apart from its buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    AllReduce,
    Broadcast,
    ReduceScatter,
    AllGather,
    Barrier,
    /// Point to point: both ends call it a message.
    Message,
    Reduce,
    Gather,
    Scatter,
    AllToAll,
    MonitoredBarrier,
}

const KINDS: [(Kind, &str); 11] = [
    (Kind::AllReduce, "all-reduce"),
    (Kind::Broadcast, "broadcast"),
    (Kind::ReduceScatter, "reduce-scatter"),
    (Kind::AllGather, "all-gather"),
    (Kind::Barrier, "barrier"),
    (Kind::Message, "message"),
    (Kind::Reduce, "reduce"),
    (Kind::Gather, "gather"),
    (Kind::Scatter, "scatter"),
    (Kind::AllToAll, "all-to-all"),
    (Kind::MonitoredBarrier, "monitored barrier"),
];

/// The words of an operation that both sides must agree on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Signature {
    pub(crate) kind: Kind,
    /// The reduction.
    pub(crate) op: Option<ReduceOpCode>,
    /// How a collective is carried out; until it is issued, how it shall be, if somebody asked.
    pub(crate) algorithm: Option<Algorithm>,
    /// The rank that an operation goes out from or comes together at, a message's tag, or the number of the memory that all
    /// see.
    pub(crate) detail: u32,
    /// Where in memory that all see the elements lie, if they do.
    pub(crate) at: u32,
    /// Collectives of a group are counted together, messages for each pair.
    pub(crate) sequence: u64,
    pub(crate) element: ElementKind,
    pub(crate) count: usize,
}

/// The number of a reduction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ReduceOpCode(pub(crate) u8);

impl From<ReduceOp> for ReduceOpCode {
    fn from(op: ReduceOp) -> ReduceOpCode {
        ReduceOpCode(op.code())
    }
}

/// Bytes of a header.
pub(crate) const HEADER: usize = 32;
const MAGIC: [u8; 4] = *b"plx2";
/// Where the number of the algorithm stands.
const ALGORITHM: usize = 7;
/// Where in shared memory its elements lie.
const AT: std::ops::Range<usize> = 12..16;
/// The number of no reduction.
const NO_REDUCTION: u8 = u8::MAX;

/// In the place of the kind: a question whether the operation is understood alike.
const QUESTION: u8 = 0x80;

/// Beside the kind of a message: its elements don't follow, but lie on a shelf, and where they do stands in the place of `at`.
const SHELVED: u8 = 0x40;

/// A header as it comes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Header(pub(crate) [u8; HEADER]);

impl Signature {
    /// The header of a message of `count` elements, which is the operation's count except where parts are uneven.
    pub(crate) fn header(&self, count: usize) -> Header {
        let mut header = [0; HEADER];
        header[..4].copy_from_slice(&MAGIC);
        header[4] = self.kind as u8;
        header[5] = self.element.code;
        header[6] = self.op.map_or(NO_REDUCTION, |op| op.0);
        header[ALGORITHM] = self.algorithm.map_or(0, Algorithm::code);
        header[8..12].copy_from_slice(&self.detail.to_le_bytes());
        header[AT].copy_from_slice(&self.at.to_le_bytes());
        header[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        header[24..].copy_from_slice(&(count as u64).to_le_bytes());
        Header(header)
    }

    pub(crate) fn describe(&self) -> String {
        self.header(self.count).describe()
    }

    /// Whether a header of this operation says what this rank understands by it.
    pub(crate) fn agrees(&self, header: &Header) -> bool {
        // Each rank sends another as much as it likes, and only those two must agree.
        let count = if self.kind == Kind::AllToAll { header.count() as usize } else { self.count };
        self.header(count) == *header
    }
}

impl Header {
    fn word(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.0[at..at + 8].try_into().expect("eight bytes"))
    }

    /// Whether it speaks of an operation at all.
    fn is_known(&self) -> bool {
        self.0[..4] == MAGIC && usize::from(self.0[4]) < KINDS.len()
    }

    /// The question whether the receiver understands this operation as the sender does.
    pub(crate) fn question(mut self) -> Header {
        self.0[4] |= QUESTION;
        self
    }

    /// What is asked about, if it is a question.
    pub(crate) fn asked(mut self) -> Option<Header> {
        let is_question = self.0[4] & QUESTION != 0;
        self.0[4] &= !QUESTION;
        (is_question && self.is_known()).then_some(self)
    }

    /// The header of this message where its elements lie on a shelf.
    pub(crate) fn shelved(mut self, at: u32) -> Header {
        self.0[4] |= SHELVED;
        self.0[AT].copy_from_slice(&at.to_le_bytes());
        self
    }

    /// The header of the message whose elements lie on a shelf, and where, if they do.
    pub(crate) fn unshelved(mut self) -> Option<(Header, u32)> {
        let at = u32::from_le_bytes(self.0[AT].try_into().expect("four bytes"));
        self.0[AT].fill(0);
        let is_shelved = self.0[4] == Kind::Message as u8 | SHELVED;
        self.0[4] &= !SHELVED;
        (is_shelved && self.is_known()).then_some((self, at))
    }

    /// The number of the operation.
    pub(crate) fn sequence(&self) -> u64 {
        self.word(16)
    }

    pub(crate) fn is_message(&self) -> bool {
        self.is_known() && self.0[4] == Kind::Message as u8
    }

    /// A message's tag.
    pub(crate) fn detail(&self) -> u32 {
        u32::from_le_bytes(self.0[8..12].try_into().expect("four bytes"))
    }

    /// The number of the element type.
    pub(crate) fn element(&self) -> u8 {
        self.0[5]
    }

    pub(crate) fn count(&self) -> u64 {
        self.word(24)
    }

    /// The operation, for people.
    pub(crate) fn describe(&self) -> String {
        if let Some((header, _)) = self.unshelved() {
            return header.describe();
        }
        if !self.is_known() {
            return "something that isn't an operation".into();
        }
        let (kind, name) = KINDS[usize::from(self.0[4])];
        let reduction = match self.0[6] {
            NO_REDUCTION => String::new(),
            code => format!(", {}", ReduceOp::name_of(code)),
        };
        let detail = match kind {
            Kind::Broadcast | Kind::Scatter => format!(", from rank {}", Rank(self.detail())),
            Kind::Reduce | Kind::Gather => format!(", to rank {}", Rank(self.detail())),
            Kind::AllReduce | Kind::ReduceScatter | Kind::AllGather if self.detail() != 0 => {
                let at = u32::from_le_bytes(self.0[AT].try_into().expect("four bytes"));
                format!(", at byte {} of shared memory {}", u64::from(at) * 4, self.detail())
            }
            Kind::Message if self.detail() != 0 => format!(", tag {}", self.detail()),
            _ => String::new(),
        };
        let element = ElementKind::name_of(self.element());
        // A message that may come from anyone has no number of its own.
        let number = if self.sequence() == 0 { String::new() } else { format!(" #{}", self.sequence()) };
        format!("{name}{number} ({} x {element}{reduction}{detail})", self.count())
    }

    /// The operation, for people who see the other beside it: where nothing else differs, with its algorithm.
    pub(crate) fn describe_beside(&self, other: &Header) -> String {
        let but_for_algorithm = |header: &Header| {
            let mut header = header.0;
            header[ALGORITHM] = 0;
            header
        };
        if but_for_algorithm(self) != but_for_algorithm(other) {
            return self.describe();
        }
        let algorithm = Algorithm::of_code(self.0[ALGORITHM]);
        let algorithm = algorithm.map_or_else(|| "no known algorithm".into(), |known| known.to_string());
        format!("{} by {algorithm}", self.describe())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::Element;

    #[test]
    fn kinds_stand_at_their_numbers() {
        assert!(KINDS.iter().enumerate().all(|(i, (kind, _))| *kind as usize == i));
    }

    #[test]
    fn a_header_says_what_it_belongs_to() {
        let signature = Signature {
            kind: Kind::Reduce,
            op: Some(ReduceOp::Max.into()),
            algorithm: Some(Algorithm::Ring),
            detail: 2,
            at: 0,
            sequence: 7,
            element: f32::KIND,
            count: 10,
        };
        assert_eq!(signature.describe(), "reduce #7 (10 x f32, max, to rank 2)");
        let ring = signature.header(10);
        let tree = Signature { algorithm: Some(Algorithm::Tree), ..signature }.header(10);
        assert_eq!(ring.describe_beside(&tree), "reduce #7 (10 x f32, max, to rank 2) by ring");
        assert_eq!(tree.describe_beside(&ring), "reduce #7 (10 x f32, max, to rank 2) by tree");
        assert_eq!(tree.describe_beside(&signature.header(9)), "reduce #7 (10 x f32, max, to rank 2)");
        let message = Signature { kind: Kind::Message, op: None, algorithm: None, detail: 5, ..signature };
        assert_eq!(message.header(3).describe(), "message #7 (3 x f32, tag 5)");
        assert_eq!(message.header(3).asked(), None);
        assert_eq!(message.header(3).question().asked(), Some(message.header(3)));
        let shelved = message.header(3).shelved(4096);
        assert_eq!((shelved.unshelved(), shelved.asked()), (Some((message.header(3), 4096)), None));
        assert_eq!((message.header(3).unshelved(), ring.shelved(8).unshelved()), (None, None));
        assert_eq!(shelved.describe(), "message #7 (3 x f32, tag 5)");
        assert_eq!(Header([9; HEADER]).describe(), "something that isn't an operation");
    }
}
