//! The time before each line, in UTC: RFC 3339 with milliseconds, 25 bytes with the space behind them.
//!
//! What a program writes comes in pieces of any length. A line has the time of its first piece, and so has each state of a
//! progress bar, which begins behind a carriage return: shown by `cat`, it covers the one before as it did on a terminal. Without
//! the times a log is what the program wrote, byte for byte.

use std::time::SystemTime;

/// Where times are put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogTimes {
    /// Before the lines of the logs.
    Logs,
    /// There, and on the console.
    Everywhere,
    /// Nowhere: logs hold the bytes that the workers wrote and nothing else.
    Nowhere,
}

/// One stream of text that times are put into.
#[derive(Debug, Default)]
pub(crate) struct Stamper(Before);

/// What the byte before the next one means to it.
#[derive(Clone, Copy, Debug, Default)]
enum Before {
    /// It begins a line.
    #[default]
    Line,
    /// It begins a line that covers the last one, unless it ends that line.
    Return,
    /// It goes on.
    Text,
}

impl Stamper {
    /// Adds another piece of the text, which came at this time, to `to`.
    pub(crate) fn add(&mut self, piece: &[u8], time: &str, to: &mut Vec<u8>) {
        for part in piece.split_inclusive(|&byte| byte == b'\n' || byte == b'\r') {
            let begins = match self.0 {
                Before::Line => true,
                Before::Return => part != b"\n",
                Before::Text => false,
            };
            if begins {
                to.extend_from_slice(time.as_bytes());
            }
            to.extend_from_slice(part);
            self.0 = match part.last() {
                Some(b'\n') => Before::Line,
                Some(b'\r') => Before::Return,
                _ => Before::Text,
            };
        }
    }
}

/// The time as it stands before a line.
pub(crate) fn stamp(time: SystemTime) -> String {
    // A clock that is set to before 1970 is no clock.
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let (seconds, ms) = (since.as_secs(), since.subsec_millis());
    let (year, month, day) = date(seconds / 86_400);
    let [hour, minute, second] = [seconds / 3600 % 24, seconds / 60 % 60, seconds % 60];
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{ms:03}Z ")
}

/// Year, month and day, so many days after 1970-01-01. Years are counted from March, so that the day that some have more is their
/// last; 400 of them are 146,097 days (<https://howardhinnant.github.io/date_algorithms.html>, `civil_from_days`).
fn date(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = (month_from_march + 2) % 12 + 1;
    (400 * era + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn times_are_those_of_date_utc() {
        let check = |ms: u64, want: &str| {
            assert_eq!(stamp(SystemTime::UNIX_EPOCH + Duration::from_millis(ms)), want);
        };
        // From `date -u -d @SECONDS +%FT%TZ`.
        check(0, "1970-01-01T00:00:00.000Z ");
        check(951_782_399_999, "2000-02-28T23:59:59.999Z ");
        check(951_782_400_000, "2000-02-29T00:00:00.000Z ");
        check(1_709_164_800_007, "2024-02-29T00:00:00.007Z ");
        check(1_735_689_599_000, "2024-12-31T23:59:59.000Z ");
        check(1_795_313_632_123, "2026-11-22T02:13:52.123Z ");
        check(4_107_542_400_000, "2100-03-01T00:00:00.000Z ");
    }

    #[test]
    fn each_line_has_one_time_however_it_came() {
        let check = |text: &str, want: &str| {
            // In one piece, byte by byte, and in two pieces that meet anywhere.
            let whole: &[u8] = text.as_bytes();
            let cuts = (0..=whole.len()).map(|at| {
                let (a, b) = whole.split_at(at);
                vec![a, b]
            });
            for pieces in cuts.chain([whole.chunks(1).collect()]) {
                let (mut stamper, mut got) = (Stamper::default(), Vec::new());
                pieces.iter().for_each(|piece| stamper.add(piece, "T ", &mut got));
                assert_eq!(String::from_utf8_lossy(&got), want, "{text:?}");
            }
        };
        check("", "");
        check("one\ntwo\n", "T one\nT two\n");
        check("no end", "T no end");
        check("\n\nx", "T \nT \nT x");
        check("dos\r\nline\r\n", "T dos\r\nT line\r\n");
        check("10%\r20%\rdone\n", "T 10%\rT 20%\rT done\n");
        check("\r10%\r\n", "T \rT 10%\r\n");
    }
}
