//! What is fair: how many slots each queue would hold if all asked at once.
//!
//! Each queue has its quota first, as far as it asks for so much. What the quotas leave over goes to those that ask for more, by
//! weight, in rounds, since one that needs less than its part leaves the rest to the others. That is the division of Run:ai's
//! scheduler (github.com/kai-scheduler/KAI-Scheduler) without its priorities and its memory of earlier use, but for slots that
//! don't divide: these are nobody's right. Whoever holds one keeps it, and nobody is made to give one up for such a piece, so that
//! it doesn't go to and fro.

/// What a queue asks for, and by which right.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claim {
    pub(crate) quota: u32,
    pub(crate) weight: u32,
    /// What its jobs would take in all, up to its limit.
    pub(crate) request: u32,
}

/// A part of all slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    /// What can be claimed.
    pub(crate) claims: u32,
    /// What can be kept: one more where slots don't divide.
    pub(crate) keeps: u32,
}

/// What each claim has by its quota, of `total` slots: as much of it as it asks for. Where nodes are away, or more was promised
/// than there is, quotas are what is divided by.
pub(crate) fn owed(total: u32, claims: &[Claim]) -> Vec<Share> {
    let owed = |claim: &Claim| claim.quota.min(claim.request);
    if claims.iter().map(|claim| u64::from(owed(claim))).sum::<u64>() <= u64::from(total) {
        return claims.iter().map(owed).map(|owed| Share { claims: owed, keeps: owed }).collect();
    }
    let by_quota = |claim: &Claim| Claim { quota: 0, weight: claim.quota, request: owed(claim) };
    divide(total, &claims.iter().map(by_quota).collect::<Vec<Claim>>(), vec![0; claims.len()])
}

/// The share of each claim, of `total` slots. Nobody's is above what it asks for.
pub(crate) fn fair_shares(total: u32, claims: &[Claim]) -> Vec<Share> {
    divide(total, claims, owed(total, claims).iter().map(|owed| owed.claims).collect())
}

/// Shares out by weight what is left of `total`.
fn divide(total: u32, claims: &[Claim], mut shares: Vec<u32>) -> Vec<Share> {
    let mut left = total.saturating_sub(shares.iter().sum());
    loop {
        let asking: Vec<usize> = (0..claims.len()).filter(|&i| shares[i] < claims[i].request).collect();
        let weights: u64 = asking.iter().map(|&i| u64::from(claims[i].weight)).sum();
        let before = left;
        for &i in &asking {
            let offer = (u64::from(before) * u64::from(claims[i].weight) / weights) as u32;
            let taken = offer.min(claims[i].request - shares[i]);
            shares[i] += taken;
            left -= taken;
        }
        if left == before {
            // Fewer than whole slots for each, if anything.
            let has_piece = |i: usize| left > 0 && shares[i] < claims[i].request;
            let share = |i: usize| Share { claims: shares[i], keeps: shares[i] + u32::from(has_piece(i)) };
            return (0..claims.len()).map(share).collect();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn claim(quota: u32, weight: u32, request: u32) -> Claim {
        Claim { quota, weight, request }
    }

    #[test]
    fn quotas_come_first_and_the_rest_goes_by_weight() {
        type Row<'a> = (u32, &'a [Claim], &'a [(u32, u32)]);
        let rows: [Row<'_>; 11] = [
            (4, &[], &[]),
            (0, &[claim(1, 1, 1)], &[(0, 0)]),
            (4, &[claim(2, 1, 9), claim(2, 1, 9)], &[(2, 2), (2, 2)]),
            (4, &[claim(2, 1, 9), claim(2, 1, 1)], &[(3, 3), (1, 1)]),
            (8, &[claim(2, 1, 9), claim(2, 3, 9)], &[(3, 3), (5, 5)]),
            (8, &[claim(0, 1, 9), claim(0, 1, 2), claim(0, 1, 9)], &[(3, 3), (2, 2), (3, 3)]),
            (3, &[claim(0, 1, 9), claim(0, 1, 9)], &[(1, 2), (1, 2)]),
            // More is promised than there is.
            (2, &[claim(3, 1, 3), claim(3, 1, 2)], &[(1, 1), (1, 1)]),
            (4, &[claim(2, 1, 4), claim(4, 1, 4)], &[(1, 2), (2, 3)]),
            (1, &[claim(1, 1, 2), claim(1, 1, 2)], &[(0, 1), (0, 1)]),
            (5, &[claim(0, 1, 1), claim(0, 1, 1)], &[(1, 1), (1, 1)]),
        ];
        for (total, claims, want) in rows {
            let want: Vec<Share> = want.iter().map(|&(claims, keeps)| Share { claims, keeps }).collect();
            assert_eq!(fair_shares(total, claims), want, "{total} {claims:?}");
        }
    }

    proptest! {
        #[test]
        fn all_is_shared_out_and_nobody_has_more_than_it_asks_for(
            total in 0u32..200,
            claims in proptest::collection::vec((0u32..40, 1u32..9, 0u32..90), 0..8),
        ) {
            let claim = |(quota, weight, request): (u32, u32, u32)| claim(quota, weight, request);
            let claims: Vec<Claim> = claims.into_iter().map(claim).collect();
            let shares = fair_shares(total, &claims);
            for ((share, claim), owed) in shares.iter().zip(&claims).zip(owed(total, &claims)) {
                prop_assert!(owed.claims <= share.claims && owed.claims <= claim.quota);
                prop_assert!(share.claims <= share.keeps && share.keeps <= claim.request);
            }
            let asked: u32 = claims.iter().map(|claim| claim.request).sum();
            let claimed: u32 = shares.iter().map(|share| share.claims).sum();
            let pieces = shares.iter().filter(|share| share.keeps > share.claims).count() as u32;
            // What is left is less than a slot for each that wants one more.
            prop_assert!(claimed <= total && (claimed == asked.min(total) || asked.min(total) - claimed < pieces));
        }
    }
}
