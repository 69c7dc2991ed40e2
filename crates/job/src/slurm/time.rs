//! Times as Slurm writes them.

use std::time::Duration;

/// A time as Slurm prints what is left of one: `[[days-]hours:]minutes:seconds`; none for what is no time, such as `UNLIMITED`.
pub fn duration(text: &str) -> Option<Duration> {
    let (days, clock) = text.split_once('-').unwrap_or(("0", text));
    let parts: Vec<u64> = clock.split(':').map(|part| part.parse().ok()).collect::<Option<_>>()?;
    let (hours, minutes, seconds) = match parts[..] {
        [minutes, seconds] => (0, minutes, seconds),
        [hours, minutes, seconds] => (hours, minutes, seconds),
        _ => return None,
    };
    let hours = days.parse::<u64>().ok()?.checked_mul(24)?.checked_add(hours)?;
    let minutes = hours.checked_mul(60)?.checked_add(minutes)?;
    Some(Duration::from_secs(minutes.checked_mul(60)?.checked_add(seconds)?))
}

/// The same the other way round, as `[days-]hours:minutes:seconds`, which cannot be taken for minutes.
pub fn written(time: Duration) -> String {
    let seconds = time.as_secs();
    let (days, hours) = (seconds / 86_400, seconds / 3600 % 24);
    let clock = format!("{hours:02}:{:02}:{:02}", seconds / 60 % 60, seconds % 60);
    if days > 0 { format!("{days}-{clock}") } else { clock }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_slurm_prints_them() {
        let check = |text: &str, want: Option<u64>| {
            assert_eq!(duration(text), want.map(Duration::from_secs), "{text}")
        };
        check("0:07", Some(7));
        check("59:30", Some(3570));
        check("1:00:00", Some(3600));
        check("2-03:00:01", Some(183_601));
        ["UNLIMITED", "NOT_SET", "INVALID", "", "7", "1-2", "x-1:00", "18446744073709551615-0:00"]
            .iter()
            .for_each(|text| check(text, None));
    }

    #[test]
    fn times_are_written_as_slurm_reads_them() {
        for (seconds, want) in [(7, "00:00:07"), (28_800, "08:00:00"), (183_601, "2-03:00:01")] {
            let time = Duration::from_secs(seconds);
            assert_eq!(written(time), want);
            assert_eq!(duration(want), Some(time));
        }
    }
}
