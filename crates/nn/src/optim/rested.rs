//! How many steps were made of each parameter, where that isn't as many as of the others: one that was frozen for a while
//! ([`crate::freeze`]) has a state that has seen fewer gradients, and what a rule makes of a young state goes by its age.

use super::Optimizer;
use std::collections::BTreeMap;

/// Steps that parameters were left out of, by name; who made all of them isn't named.
pub type Rested = BTreeMap<String, u64>;

/// The count of them.
#[derive(Default)]
pub(super) struct Rest {
    /// After the optimizer's step number `since`.
    pub(super) then: Rested,
    pub(super) since: u64,
    /// Who has rested since.
    pub(super) frozen: Vec<String>,
}

impl Optimizer {
    /// The steps that parameters were left out of, as far as [`Optimizer::group`] was told of them.
    pub fn rested(&self) -> Rested {
        let Rest { then, since, frozen } = &self.rest;
        let (mut rested, more) = (then.clone(), self.steps - since);
        if more > 0 {
            frozen.iter().for_each(|name| *rested.entry(name.clone()).or_default() += more);
        }
        rested
    }
}
