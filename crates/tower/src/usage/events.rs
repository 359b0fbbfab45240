//! Event streams (`text/event-stream`). The data of each event is a JSON document.

use super::{UsageCounts, json::JsonScanner};

const DATA: &[u8] = b"data:";

/// A scanner for an event stream. The scanner passes the data of all events to a JSON scanner.
#[derive(Clone, Debug, Default)]
pub(super) struct EventStreamScanner {
    line: LineState,
    /// Whether the last byte was a CR. An LF after a CR belongs to the same line ending.
    was_cr: bool,
    json: JsonScanner,
}

/// The part of the current line that was already read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LineState {
    /// The part read so far is the beginning of `data:`. The value is the length of the part read
    /// so far.
    Name(usize),
    /// The line contains data.
    Data,
    /// The line contains something else.
    Other,
}

impl Default for LineState {
    fn default() -> Self {
        Self::Name(0)
    }
}

impl EventStreamScanner {
    pub(super) fn scan(&mut self, bytes: &[u8], counts: &mut UsageCounts) {
        let mut rest = bytes;
        while let Some((byte, after)) = rest.split_first() {
            if matches!(byte, b'\r' | b'\n') {
                self.end_line(*byte, counts);
                rest = after;
                continue;
            }
            self.was_cr = false;
            match self.line {
                LineState::Name(length) => {
                    self.line = if DATA.get(length) != Some(byte) {
                        LineState::Other
                    } else if length + 1 == DATA.len() {
                        LineState::Data
                    } else {
                        LineState::Name(length + 1)
                    };
                    rest = after;
                }
                LineState::Data | LineState::Other => {
                    let end = rest.iter().position(|byte| matches!(byte, b'\r' | b'\n'));
                    let (line, next) = rest.split_at(end.unwrap_or(rest.len()));
                    if self.line == LineState::Data {
                        self.json.scan(line, counts);
                    }
                    rest = next;
                }
            }
        }
    }

    fn end_line(&mut self, byte: u8, counts: &mut UsageCounts) {
        let is_rest_of_end = byte == b'\n' && self.was_cr;
        self.was_cr = byte == b'\r';
        if is_rest_of_end {
            return;
        }
        if self.line == LineState::Name(0) {
            // An empty line ends the event. A document does not continue in the next event.
            self.json = JsonScanner::default();
        } else if self.line == LineState::Data {
            // The data lines of an event are joined with a line feed.
            self.json.scan(b"\n", counts);
        }
        self.line = LineState::default();
    }
}
