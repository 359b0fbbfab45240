//! Splits a fuzzing input into messages, each with a header:
//!
//! ```text
//! | seconds since the last, 1 byte | sender, 1 byte | length, 2 bytes | message |
//! ```

/// A message, with its sender and the time since the previous message in seconds.
pub struct Frame<'i> {
    pub seconds: u64,
    pub sender: usize,
    pub message: &'i [u8],
}

/// Returns the messages. The last message may be shorter than its length field says.
pub fn frames(mut input: &[u8]) -> impl Iterator<Item = Frame<'_>> {
    std::iter::from_fn(move || {
        let (&[seconds, sender, high, low], rest) = input.split_first_chunk()?;
        let length = usize::from(u16::from_be_bytes([high, low])).min(rest.len());
        let (message, rest) = rest.split_at(length);
        input = rest;
        Some(Frame {
            seconds: seconds.into(),
            sender: sender.into(),
            message,
        })
    })
}
