//! What Slurm tells the processes that it starts, and how it is asked for more.

mod ask;
mod hostlist;
mod step;
mod time;
mod trouble;

pub use ask::{AskError, ask, ask_outside, node_address};
pub use hostlist::{Hostlist, HostlistError, MAX_HOSTS};
pub use step::{AgentPlace, Step};
pub use time::{duration, written};
pub use trouble::trouble;

pub(crate) use ask::time_left;
