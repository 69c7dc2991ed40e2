//! What is known of messages and peers, for waits and for errors.

use super::{Arriving, Mail, Place, lost_in};
use crate::error::{Error, Heard};
use phalanx_wire::Rank;
use std::time::Duration;

impl Mail {
    /// Bytes that went to a rank, headers included.
    pub(crate) fn sent_to(&self, peer: usize) -> u64 {
        self.lines[peer].sent
    }

    /// What was heard of these ranks last.
    pub(crate) fn heard(&self, ranks: &[Rank]) -> Vec<Heard> {
        let heard = |&rank: &Rank| match self.lines[rank.index()].heard {
            Some((header, at)) => {
                Heard { rank, operation: Some(header.describe()), ago: at.elapsed(), pace: None }
            }
            None => Heard { rank, operation: None, ago: Duration::ZERO, pace: None },
        };
        ranks.iter().map(heard).collect()
    }

    /// All ranks but this one.
    pub(crate) fn others(&self) -> impl Iterator<Item = usize> {
        let own = self.rank.index();
        (0..self.lines.len()).filter(move |&peer| peer != own)
    }

    /// That one of them is gone, as far as was seen, and whether it took its leave; one that didn't comes first.
    pub(crate) fn left(&self, operation: &str) -> Option<(Error, bool)> {
        let gone = |peer: usize| {
            let lost = self.lines[peer].gone.clone()?;
            Some((lost.into_error(operation.to_owned(), Rank(peer as u32)), self.took_leave(peer)))
        };
        self.others().filter_map(gone).min_by_key(|(_, took_leave)| *took_leave)
    }

    /// What a letter that was asked for or is being sent is, and the ranks that it waits for.
    pub(crate) fn find(&self, ticket: u64) -> Option<(String, Vec<usize>)> {
        let others = || self.others();
        let arriving = self.lines.iter().filter_map(|line| match &line.arriving {
            Some(Arriving { into: Place::Wanted(wanted), .. }) => Some(wanted),
            _ => None,
        });
        let wanted = self.wanted.iter().chain(arriving).find(|wanted| wanted.ticket == ticket);
        if let Some(wanted) = wanted {
            let from = wanted.from.map_or_else(|| others().collect(), |from| vec![from]);
            return Some((wanted.signature.describe(), from));
        }
        others().find_map(|peer| {
            let letter = self.lines[peer].outgoing.iter().find(|letter| letter.ticket == Some(ticket))?;
            Some((letter.header.describe(), vec![peer]))
        })
    }

    /// Why a letter that is waited for can't come: whoever could send it is gone, or wants a collective first, that no other
    /// thread can start now. So many of those were started here.
    pub(crate) fn stuck(&self, ticket: u64, collectives: u64) -> Option<Error> {
        let wanted = self.wanted.iter().find(|wanted| wanted.ticket == ticket)?;
        let ours = wanted.signature.header(wanted.signature.count);
        let mut why = None;
        for peer in self.others() {
            let line = &self.lines[peer];
            if wanted.from.is_some_and(|from| from != peer) {
                continue;
            }
            let asked = line.asked.filter(|asked| asked.sequence() > collectives);
            let first = if line.stands() { Some(line.head) } else { asked };
            let overrun = self.overrun(peer);
            match (&line.gone, first) {
                _ if overrun.is_some() => why = why.or(overrun),
                (Some(lost), _) => why = Some(lost_in(&ours, peer, lost.clone())),
                (None, Some(first)) => why = why.or_else(|| Some(self.mismatch(&ours, peer, &first))),
                (None, None) => return None,
            }
        }
        why
    }

    /// Which ranks letters are still to come from, and which must still take one.
    pub(crate) fn waits_for(&self) -> (Vec<usize>, Vec<usize>) {
        let others = || self.others();
        // What stands on a wire and can't be taken is nothing to wait for.
        let comes = |&peer: &usize| {
            let line = &self.lines[peer];
            (self.needs(peer) || self.reads_all()) && line.gone.is_none() && !line.stands()
        };
        let goes = |&peer: &usize| !self.lines[peer].outgoing.is_empty();
        (others().filter(comes).collect(), others().filter(goes).collect())
    }
}
