//! Reads the requests of several logs, ordered by time.
//!
//! Servers write a line when the response is complete, so lines are not in the order of arrival.
//! Each log is sorted within a window: a line is held back until a line with a time at least
//! [`SORT_WINDOW`] later has been read. At most [`MAX_HELD`] lines are held back. The logs are
//! merged by time. A log is opened when the simulation reaches the time of the log's first lines.
//! Rotated files are therefore read one after the other.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
    sync::Arc,
};

use rayon::iter::{IntoParallelIterator as _, ParallelIterator as _};
use serde::Serialize;
use tidegate_core::{Cost, Span, Timestamp};

use crate::{
    SimulateError,
    field::EntryMapping,
    format::{CompiledFormat, LogFormat, SAMPLE_LINES},
    input::{InputError, LineStatus, LogReader, LogSource, MAX_LINE_BYTES, SimulationHandle},
    request::{EntryExtractor, EntryValues},
};

/// Lines are sorted by time within this window.
pub const SORT_WINDOW: Span = Span::from_secs(60);

/// The maximum number of lines that are parsed together.
const BATCH_LINES: usize = 1_024;
/// The maximum total size, in bytes, of the lines that are parsed together.
const BATCH_BYTES: usize = 1 << 20;

/// The maximum number of held-back lines per log.
pub const MAX_HELD: usize = 65_536;

/// The maximum total size of the values in one log's held-back lines, in bytes.
const MAX_HELD_BYTES: usize = 256 << 20;

/// A line's time may be incorrect if it is more than one hour later than the times of all previous
/// lines. The time is used only if the next line confirms it.
const JUMP: Span = Span::from_secs(3_600);

/// The maximum number of damaged lines reported in full.
const SHOWN_DAMAGED: usize = 5;

/// The maximum number of characters of a line that are shown.
const SHOWN_CHARS: usize = 200;

/// A line that does not match the format.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DamagedLine {
    /// The log.
    pub file: String,
    /// The one-based line number.
    pub line: u64,
    /// A description of the difference.
    pub problem: String,
    /// The start of the line.
    pub text: String,
}

/// A request in a log.
#[derive(Debug)]
pub(crate) struct LogRequest {
    pub(crate) time: Timestamp,
    /// For each rule set, the request's entries, or the reason why the proxy would reject the
    /// request.
    pub(crate) entries: Vec<Result<EntryValues, String>>,
    pub(crate) cost: Cost,
    /// The response entries that the rules use.
    pub(crate) response: Vec<(Box<str>, Box<str>)>,
}

impl LogRequest {
    /// Returns the size of the values in bytes.
    fn bytes(&self) -> usize {
        let entries = self.entries.iter().flatten().flatten();
        let entries: usize = entries.map(|(_, value)| value.len()).sum();
        let response = self.response.iter();
        entries + response.map(|(_, value)| value.len()).sum::<usize>()
    }
}

/// Determines which entries are extracted from each line.
#[derive(Debug)]
pub(crate) struct Extraction<'p> {
    /// For each rule set, the extractor of request entries.
    pub(crate) extractors: Vec<&'p EntryExtractor>,
    /// The names of the response entries that the rules use.
    pub(crate) response: Vec<Box<str>>,
}

/// Counts of lines.
#[derive(Debug, Default)]
pub(crate) struct LineCounts {
    pub(crate) read: u64,
    pub(crate) damaged: u64,
    pub(crate) shown: Vec<DamagedLine>,
    /// The number of lines without a valid request.
    pub(crate) no_request: u64,
    /// The number of lines whose time is earlier than the time of a preceding line.
    pub(crate) backwards: u64,
    /// The number of lines whose time is earlier than the time of an already decided request.
    pub(crate) late: u64,
    /// The number of lines without the client's address.
    pub(crate) no_peer: u64,
    /// The number of lines that contain the completion time, but not the arrival time.
    pub(crate) only_completion: u64,
    pub(crate) precision: TimePrecision,
    pub(crate) from: Option<Timestamp>,
    pub(crate) to: Option<Timestamp>,
    /// The files that could not be read to the end, with the reasons.
    pub(crate) cut_off: Vec<String>,
    /// Whether a log could not be read to the end.
    pub(crate) is_cut_off: bool,
}

/// The precision of the times in a log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum TimePrecision {
    #[default]
    Second,
    Millisecond,
    Microsecond,
}

impl TimePrecision {
    fn of(time: Timestamp) -> Self {
        let micros = time.as_micros();
        if micros.is_multiple_of(1_000_000) {
            Self::Second
        } else if micros.is_multiple_of(1_000) {
            Self::Millisecond
        } else {
            Self::Microsecond
        }
    }
}

/// All logs, merged by time.
pub(crate) struct LogStream {
    logs: Vec<LogInput>,
    handle: Arc<SimulationHandle>,
    pub(crate) counts: LineCounts,
    /// The formats of the logs, in the order of the logs, without duplicates.
    pub(crate) formats: Vec<String>,
}

/// One log.
struct LogInput {
    source: LogSource,
    format: CompiledFormat,
    /// The open log; `None` until the simulation reaches the time of the log's first lines.
    reader: Option<LogReader>,
    /// Lines that were read to detect the format and have not been processed yet.
    ahead: VecDeque<(LineStatus, Vec<u8>)>,
    /// A lower bound for the times in the log, estimated from the first lines.
    earliest: Timestamp,
    /// The number of lines read so far.
    line_number: u64,
    /// Parsed lines that have not been processed yet.
    parsed: VecDeque<ParsedLine>,
    held: BinaryHeap<Reverse<BufferedRequest>>,
    held_bytes: usize,
    latest: Timestamp,
    /// The time of the last line, if this time is much later than `latest`.
    jump: Option<Timestamp>,
    decided: Timestamp,
    has_ended: bool,
}

/// A request that is held back to sort the log.
struct BufferedRequest {
    line_number: u64,
    request: LogRequest,
}

impl BufferedRequest {
    fn key(&self) -> (Timestamp, u64) {
        (self.request.time, self.line_number)
    }
}

impl PartialEq for BufferedRequest {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for BufferedRequest {}

impl PartialOrd for BufferedRequest {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for BufferedRequest {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}

impl LogStream {
    /// Opens all logs and detects their formats.
    pub(crate) fn open(
        sources: &[LogSource],
        wanted: &LogFormat,
        mappings: &[EntryMapping],
        handle: &Arc<SimulationHandle>,
    ) -> Result<Self, SimulateError> {
        let mut logs = Vec::new();
        let mut empty = Vec::new();
        for source in sources {
            match LogInput::open(source, wanted, mappings, handle)? {
                Some(log) => logs.push(log),
                None => empty.push(source.name()),
            }
        }
        if logs.is_empty() {
            return Err(SimulateError::Empty {
                files: empty.join(", "),
            });
        }
        let mut formats: Vec<String> = Vec::new();
        for log in &logs {
            if !formats.contains(&log.format.name) {
                formats.push(log.format.name.clone());
            }
        }
        let counts = LineCounts {
            cut_off: empty
                .iter()
                .map(|name| format!("{name} is empty"))
                .collect(),
            ..LineCounts::default()
        };
        Ok(Self {
            logs,
            handle: Arc::clone(handle),
            counts,
            formats,
        })
    }

    /// Returns the next request; `None` at the end, and after an interruption.
    pub(crate) fn next(&mut self, extraction: &Extraction<'_>) -> Option<LogRequest> {
        loop {
            if self.handle.is_interrupted() {
                return None;
            }
            let mut first: Option<(Timestamp, usize)> = None;
            for (at, log) in self.logs.iter_mut().enumerate() {
                log.fill(extraction, &self.handle, &mut self.counts);
                let time = log.head();
                // If several requests have the same time, they are returned in the order of their
                // logs.
                if let Some(time) = time
                    && first.is_none_or(|(earliest, _)| time < earliest)
                {
                    first = Some((time, at));
                }
            }
            let (_, at) = first?;
            let log = &mut self.logs[at];
            if log.reader.is_none() && !log.has_ended {
                log.start(&self.handle, &mut self.counts);
                continue;
            }
            let Reverse(BufferedRequest { request, .. }) = log.held.pop()?;
            log.held_bytes = log.held_bytes.saturating_sub(request.bytes());
            if request.time < log.decided {
                self.counts.late += 1;
            }
            log.decided = log.decided.max(request.time);
            self.logs
                .retain(|log| !log.has_ended || !log.held.is_empty() || !log.parsed.is_empty());
            return Some(request);
        }
    }
}

impl LogInput {
    /// Opens a log and detects its format. Returns `None` if the log is empty.
    fn open(
        source: &LogSource,
        wanted: &LogFormat,
        mappings: &[EntryMapping],
        handle: &Arc<SimulationHandle>,
    ) -> Result<Option<Self>, SimulateError> {
        let name = || source.name();
        let mut reader =
            LogReader::open(source, handle).map_err(|problem| SimulateError::Input {
                file: name(),
                problem,
            })?;
        let mut ahead = VecDeque::new();
        let mut sample = Vec::new();
        while sample.len() < SAMPLE_LINES {
            let mut line = Vec::new();
            let read = reader.next_line(&mut line);
            let read = read.map_err(|error| SimulateError::Input {
                file: name(),
                problem: InputError::Unreadable(error),
            });
            // Lines that precede a damaged part can still be used.
            let kind = match read {
                Err(error) if sample.is_empty() => return Err(error),
                Err(_) | Ok(LineStatus::End) => break,
                Ok(kind) => kind,
            };
            if kind == LineStatus::Whole && !line.iter().all(u8::is_ascii_whitespace) {
                sample.push(String::from_utf8_lossy(&line).into_owned());
            }
            ahead.push_back((kind, line));
            if ahead.len() >= 4 * SAMPLE_LINES {
                break;
            }
        }
        if ahead.is_empty() {
            return Ok(None);
        }
        if sample.is_empty() {
            return Err(SimulateError::NoLines { file: name() });
        }
        let format = CompiledFormat::find(wanted, &sample, mappings).map_err(|unknown| {
            SimulateError::UnknownFormat {
                file: name(),
                nearest: unknown.nearest,
                column: unknown.error.column,
                problem: unknown.error.problem,
                line: shown(&unknown.line),
            }
        })?;
        let arrivals = sample
            .iter()
            .filter_map(|line| format.parse(line).ok()?.arrival());
        let earliest = arrivals.min().unwrap_or_default().before(SORT_WINDOW);
        // The file is closed now, and opened again when the simulation reaches the time of the
        // file's first line, so that few files are open at the same time.
        let is_reopened = source.size().is_some();
        if is_reopened {
            ahead.clear();
        }
        Ok(Some(Self {
            source: source.clone(),
            format,
            reader: (!is_reopened).then_some(reader),
            ahead,
            earliest,
            line_number: 0,
            parsed: VecDeque::new(),
            held: BinaryHeap::new(),
            held_bytes: 0,
            latest: Timestamp::default(),
            jump: None,
            decided: Timestamp::default(),
            has_ended: false,
        }))
    }

    fn start(&mut self, handle: &Arc<SimulationHandle>, counts: &mut LineCounts) {
        match LogReader::open(&self.source, handle) {
            Ok(reader) => self.reader = Some(reader),
            Err(error) => {
                counts.is_cut_off = true;
                counts
                    .cut_off
                    .push(format!("{}: {error}", self.source.name()));
                self.has_ended = true;
            }
        }
    }

    /// Returns the time of the next request, or a lower bound for this time if the log is not open
    /// yet.
    fn head(&self) -> Option<Timestamp> {
        if self.reader.is_none() && !self.has_ended {
            return Some(self.earliest);
        }
        self.held.peek().map(|Reverse(held)| held.request.time)
    }

    /// Reads lines until the log's earliest remaining request is known.
    fn fill(
        &mut self,
        extraction: &Extraction<'_>,
        handle: &SimulationHandle,
        counts: &mut LineCounts,
    ) {
        while !handle.is_interrupted() {
            // No later line can precede the earliest held-back request, or the maximum is reached,
            // so this request is next.
            if let Some(Reverse(first)) = self.held.peek()
                && (self.held.len() >= MAX_HELD
                    || self.held_bytes >= MAX_HELD_BYTES
                    || self.latest.since(first.request.time) >= SORT_WINDOW)
            {
                return;
            }
            match self.parsed.pop_front() {
                Some(line) => self.take_line(line, counts),
                None if self.reader.is_some() => self.parse_lines(extraction, counts),
                None => return,
            }
        }
    }

    /// Reads the next lines, and parses them on all cores.
    fn parse_lines(&mut self, extraction: &Extraction<'_>, counts: &mut LineCounts) {
        let (mut lines, mut bytes) = (Vec::new(), 0);
        while lines.len() < BATCH_LINES && bytes < BATCH_BYTES {
            let mut line = Vec::new();
            match self.read_line(&mut line) {
                Ok(LineStatus::End) => {
                    self.end();
                    break;
                }
                Ok(kind) => {
                    self.line_number += 1;
                    let is_header = self.line_number == 1 && self.format.has_header();
                    let is_blank =
                        kind == LineStatus::Whole && line.iter().all(u8::is_ascii_whitespace);
                    if !is_header && !is_blank {
                        bytes += line.len();
                        lines.push((self.line_number, kind, line));
                    }
                }
                Err(error) => {
                    let (name, at) = (self.source.name(), self.line_number);
                    counts.is_cut_off = true;
                    counts
                        .cut_off
                        .push(format!("{name}: cannot be read after line {at}: {error}"));
                    self.end();
                    break;
                }
            }
        }
        let format = &self.format;
        let parsed = lines
            .into_par_iter()
            .map(|(number, kind, line)| ParsedLine {
                number,
                content: LineContent::parse(format, extraction, kind, &line),
            });
        self.parsed = parsed.collect::<Vec<ParsedLine>>().into();
    }

    fn end(&mut self) {
        self.reader = None;
        self.has_ended = true;
    }

    fn read_line(&mut self, line: &mut Vec<u8>) -> std::io::Result<LineStatus> {
        if let Some((kind, ahead)) = self.ahead.pop_front() {
            *line = ahead;
            return Ok(kind);
        }
        match &mut self.reader {
            Some(reader) => reader.next_line(line),
            None => Ok(LineStatus::End),
        }
    }

    fn take_line(&mut self, line: ParsedLine, counts: &mut LineCounts) {
        counts.read += 1;
        let line_number = line.number;
        let record = match line.content {
            LineContent::Record(record) => record,
            LineContent::Damaged { text, problem } => {
                return self.note_damaged(line_number, text, problem, counts);
            }
        };
        let time = record.time;
        counts.precision = counts.precision.max(record.precision);
        counts.only_completion += u64::from(record.has_only_completion);
        counts.no_peer += u64::from(!record.has_peer);
        counts.backwards += u64::from(time < self.latest);
        self.advance(time);
        counts.from = Some(counts.from.map_or(time, |from| from.min(time)));
        counts.to = Some(counts.to.map_or(time, |to| to.max(time)));
        match record.request {
            Some(request) => {
                self.held_bytes += request.bytes();
                self.held.push(Reverse(BufferedRequest {
                    line_number,
                    request,
                }));
            }
            None => counts.no_request += 1,
        }
    }

    /// Advances the log's latest time. A single line with an incorrect time must not disable
    /// sorting for the following lines.
    fn advance(&mut self, time: Timestamp) {
        let is_far = self.latest != Timestamp::default() && time > self.latest.after(JUMP);
        let is_confirmed = self
            .jump
            .is_some_and(|jump| time.after(JUMP) >= jump && time <= jump.after(JUMP));
        if is_far && !is_confirmed {
            self.jump = Some(time);
            return;
        }
        self.jump = None;
        self.latest = self.latest.max(time);
    }

    fn note_damaged(&self, line: u64, text: String, problem: String, counts: &mut LineCounts) {
        counts.damaged += 1;
        if counts.shown.len() < SHOWN_DAMAGED {
            counts.shown.push(DamagedLine {
                file: self.source.name(),
                line,
                problem,
                text,
            });
        }
    }
}

/// A parsed line.
struct ParsedLine {
    /// The one-based line number.
    number: u64,
    content: LineContent,
}

enum LineContent {
    Record(Box<ParsedRecord>),
    Damaged {
        /// The start of the line.
        text: String,
        problem: String,
    },
}

/// The content of a line that matches the format.
struct ParsedRecord {
    time: Timestamp,
    precision: TimePrecision,
    has_only_completion: bool,
    has_peer: bool,
    /// The request; `None` if the line has no valid request.
    request: Option<LogRequest>,
}

impl LineContent {
    /// Parses a line, and extracts the entries of its request.
    fn parse(
        format: &CompiledFormat,
        extraction: &Extraction<'_>,
        kind: LineStatus,
        line: &[u8],
    ) -> Self {
        let text = String::from_utf8_lossy(line);
        let damaged = |problem| Self::Damaged {
            text: shown(&text),
            problem,
        };
        if kind == LineStatus::TooLong {
            return damaged(format!("is longer than {} KiB", MAX_LINE_BYTES >> 10));
        }
        let record = match format.parse(&text) {
            Ok(record) => record,
            Err(error) => {
                return damaged(format!("column {}: {}", error.column, error.problem));
            }
        };
        // The record has a time, because the format rejects lines without a time.
        let time = record.arrival().unwrap_or_default();
        let response = extraction
            .response
            .iter()
            .filter_map(|name| Some((name.clone(), record.response(name)?.into())));
        let (response, cost) = (response.collect(), record.cost());
        let (precision, has_only_completion, has_peer) = (
            record
                .time()
                .map_or(TimePrecision::Second, TimePrecision::of),
            record.has_only_completion(),
            record.has_peer(),
        );
        let parts = record.into_parts().ok();
        let request = parts.map(|parts| LogRequest {
            time,
            entries: extraction
                .extractors
                .iter()
                .map(|extractor| extractor.extract(&parts))
                .collect(),
            cost,
            response,
        });
        Self::Record(Box::new(ParsedRecord {
            time,
            precision,
            has_only_completion,
            has_peer,
            request,
        }))
    }
}

/// Returns the start of a line.
fn shown(line: &str) -> String {
    let mut start: String = line.chars().take(SHOWN_CHARS).collect();
    if start.len() < line.len() {
        start.push('…');
    }
    start
}
