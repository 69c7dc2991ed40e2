//! Which lines of which workers are shown: torchrun's words for it, all in one table by local rank.

use crate::args::WrongUsage;
use phalanx_launch::Streams;

/// What is shown of each worker: what is redirected isn't, unless it is teed, and nothing is of those who aren't in the filter.
pub(super) fn shown(
    redirects: Option<&str>,
    tee: Option<&str>,
    filter: Option<&str>,
    workers: usize,
) -> Result<Vec<Streams>, WrongUsage> {
    let redirects = streams("--redirects", redirects.unwrap_or("0"), workers)?;
    let tee = streams("--tee", tee.unwrap_or("0"), workers)?;
    let wanted = filter.map(|text| ranks(text, workers)).transpose()?;
    let of = |rank: usize| {
        let (redirected, teed) = (redirects[rank], tee[rank]);
        match &wanted {
            Some(wanted) if !wanted.contains(&rank) => Streams::NONE,
            _ => Streams { out: !redirected.out || teed.out, err: !redirected.err || teed.err },
        }
    };
    Ok((0..workers).map(of).collect())
}

/// `3` for all workers, or `0:1,1:3` for some; torchrun's numbers are 1 for standard output, 2 for standard error, 3 for both.
fn streams(flag: &str, text: &str, workers: usize) -> Result<Vec<Streams>, WrongUsage> {
    let wrong = |why: String| WrongUsage(format!("{flag} {text}: {why}"));
    let code = |code: &str| match code.trim() {
        "0" => Ok(Streams::NONE),
        "1" => Ok(Streams { err: false, ..Streams::BOTH }),
        "2" => Ok(Streams { out: false, ..Streams::BOTH }),
        "3" => Ok(Streams::BOTH),
        _ => Err(wrong("must be 0, 1, 2 or 3, or by local rank as in 0:1,1:3".into())),
    };
    if !text.contains(':') {
        return Ok(vec![code(text)?; workers]);
    }
    let mut all = vec![Streams::NONE; workers];
    for part in text.split(',') {
        let (rank, of_rank) = part.split_once(':').unwrap_or((part, ""));
        let of_rank = code(of_rank)?;
        let rank: usize = rank.trim().parse().map_err(|_| wrong(format!("{rank:?} is no local rank")))?;
        let last = workers - 1;
        *all.get_mut(rank)
            .ok_or_else(|| wrong(format!("there is no worker {rank}, the last is {last}")))? = of_rank;
    }
    Ok(all)
}

fn ranks(text: &str, workers: usize) -> Result<Vec<usize>, WrongUsage> {
    let rank = |part: &str| {
        let rank = part.trim().parse().ok().filter(|rank| *rank < workers);
        let last = workers - 1;
        let wrong = || {
            WrongUsage(format!(
                "--local-ranks-filter {text}: must be local ranks from 0 to {last}, as in 0,2"
            ))
        };
        rank.ok_or_else(wrong)
    };
    text.split(',').map(rank).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_follows_from_three_flags() {
        let check = |[redirects, tee, filter]: [&str; 3], want: Result<&str, &str>| {
            let given = |text: &'static str| Some(text).filter(|text| !text.is_empty());
            let word = |streams: &Streams| match (streams.out, streams.err) {
                (false, false) => '-',
                (true, false) => 'o',
                (false, true) => 'e',
                (true, true) => 'b',
            };
            let leak = |text: &str| -> &'static str { text.to_owned().leak() };
            let got = shown(given(leak(redirects)), given(leak(tee)), given(leak(filter)), 12);
            let got = got.map(|shown| shown.iter().map(word).collect::<String>());
            match (got, want) {
                (Ok(got), Ok(want)) => assert_eq!(got, want, "{redirects} {tee} {filter}"),
                (Err(error), Err(want)) => assert!(error.0.contains(want), "{error}"),
                (got, want) => panic!("{redirects} {tee} {filter}: {got:?} and not {want:?}"),
            }
        };
        check(["", "", ""], Ok("bbbbbbbbbbbb"));
        check(["3", "", ""], Ok("------------"));
        check(["1", "", ""], Ok("eeeeeeeeeeee"));
        check(["2", "", ""], Ok("oooooooooooo"));
        check(["3", "1", ""], Ok("oooooooooooo"));
        check(["", "3", ""], Ok("bbbbbbbbbbbb"));
        // torchrun can't name a local rank above 9.
        check(["0:1,1:3,11:2", "", ""], Ok("e-bbbbbbbbbo"));
        check(["3", "0:3", ""], Ok("b-----------"));
        check(["", "", "0,2"], Ok("b-b---------"));
        check(["0:1", "", "0,2"], Ok("e-b---------"));
        check(["4", "", ""], Err("--redirects 4: must be 0, 1, 2 or 3"));
        check(["", "x", ""], Err("--tee x: must be"));
        check(["0:1,2", "", ""], Err("--redirects 0:1,2: must be"));
        check(["a:1", "", ""], Err("\"a\" is no local rank"));
        check(["12:1", "", ""], Err("there is no worker 12, the last is 11"));
        check(["", "", "12"], Err("--local-ranks-filter 12: must be local ranks from 0 to 11"));
        check(["", "", "0,,1"], Err("--local-ranks-filter"));
    }
}
