//! The environment that another process of this user was started with.

use std::fs;

/// Variables of a process, as they were at its start.
pub struct Environ(Vec<u8>);

impl Environ {
    /// That of a process. None where it has ended, or is another user's.
    pub fn of(pid: i32) -> Option<Environ> {
        fs::read(format!("/proc/{pid}/environ")).ok().filter(|all| !all.is_empty()).map(Environ)
    }

    /// What a variable is set to. None where it isn't, or not to text.
    pub fn get(&self, name: &str) -> Option<&str> {
        let of = |variable| -> Option<&[u8]> {
            <[u8]>::strip_prefix(variable, name.as_bytes()).and_then(|rest| rest.strip_prefix(b"="))
        };
        std::str::from_utf8(self.0.split(|&byte| byte == 0).find_map(of)?).ok()
    }
}

/// The processes of this machine that are to be seen, by their numbers.
pub fn processes() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_found_by_their_whole_names() {
        let environ = Environ(b"LOCAL_RANK=1\0RANK=3\0RANKS\0EMPTY=\0BYTES=\xff\0".to_vec());
        for (name, want) in [
            ("RANK", Some("3")),
            ("LOCAL_RANK", Some("1")),
            ("EMPTY", Some("")),
            ("RANKS", None),
            ("RAN", None),
            ("BYTES", None),
        ] {
            assert_eq!(environ.get(name), want, "{name}");
        }
    }

    #[test]
    fn this_process_is_among_the_processes() {
        let own = std::process::id() as i32;
        assert!(processes().any(|pid| pid == own));
        let path = std::env::var("PATH").ok();
        assert_eq!(Environ::of(own).unwrap().get("PATH").map(str::to_owned), path);
        assert!(Environ::of(i32::MAX).is_none());
    }
}
