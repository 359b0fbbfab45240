//! Messages out of one input: `| seconds until it comes, 1 byte | who sends it, 1 byte | length, 2 bytes | message |`.

/// A message that comes so many seconds after the one before.
pub struct Frame<'i> {
    pub seconds: u64,
    pub sender: usize,
    pub message: &'i [u8],
}

/// The messages; the last may be shorter than it says.
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
