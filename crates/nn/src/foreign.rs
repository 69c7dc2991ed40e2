//! What a file is that was taken for weights and holds none: a failed download, most often.

use std::path::Path;

/// What a file of this name should be.
pub(crate) fn expected(path: &Path) -> &'static str {
    let ending = path.extension().map(|ending| ending.to_ascii_lowercase());
    match ending.as_ref().and_then(|ending| ending.to_str()) {
        Some("safetensors") => "a safetensors file",
        Some("pth" | "pt" | "ckpt" | "bin") => "a file that torch.save wrote",
        _ => "a safetensors file, or one that torch.save wrote",
    }
}

/// What the bytes look like, and what to do about it.
pub(crate) fn found(bytes: &[u8]) -> (String, &'static str) {
    const AGAIN: &str = "fetch the file again";
    let start = &bytes[..bytes.len().min(200)];
    let text = start.trim_ascii_start().to_ascii_lowercase();
    if bytes.is_empty() {
        ("nothing: it is empty".into(), AGAIN)
    } else if text.starts_with(b"<!doctype html") || text.starts_with(b"<html") {
        (
            "a web page".into(),
            "fetch the file itself, by the address that the page's download button leads to",
        )
    } else if text.starts_with(b"version https://git-lfs") {
        ("a pointer of Git LFS".into(), "`git lfs pull` in its repository gets the file")
    } else if let Some(line) = first_line(start) {
        (format!("text that begins with {line:?}"), AGAIN)
    } else {
        let bytes: Vec<String> = start.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        (format!("a file that begins with the bytes {}", bytes.join(" ")), AGAIN)
    }
}

/// The first line of a text, or its beginning.
fn first_line(start: &[u8]) -> Option<String> {
    const SHOWN: usize = 40;
    let start = match std::str::from_utf8(start) {
        Ok(text) => text,
        // A letter of several bytes may be cut in two.
        Err(error) if error.error_len().is_none() => {
            std::str::from_utf8(&start[..error.valid_up_to()]).ok()?
        }
        Err(_) => return None,
    };
    let is_text = !start.is_empty() && start.chars().all(|c| !c.is_control() || c.is_ascii_whitespace());
    let line = start.lines().map(str::trim).find(|line| !line.is_empty())?;
    is_text.then(|| line.chars().take(SHOWN).collect())
}
