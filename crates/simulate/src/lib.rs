//! Simulates a rules file on recorded traffic.
//!
//! [`Simulation`] reads access logs and converts each line to the request that it describes. The
//! same code as for live requests decides each request, as if the request arrived at the time in
//! the log. The report shows which keys would have been denied, how often and when.
//!
//! ```text
//! input    files, decompression, bounded lines     format   a line becomes a record
//! record   a record becomes the head of a request  request  the entries that the rules use
//! stream   sorts and merges the logs by time       replay   rules, memory store, counts
//! compare  the decisions of two rules files        suggest  limits for the traffic of the log
//! sweep    the denials under several limits        frontier bursts for several rates
//! report   the result                              html     the result with charts
//! curve    charts of one number against another
//! ```
//!
//! Memory grows with the number of keys, not with the number of lines.

mod backlog;
mod busiest_window;
mod compare;
mod error;
mod field;
mod format;
mod frontier;
mod html;
mod input;
mod record;
mod replay;
mod report;
mod request;
mod share;
mod stream;
mod suggest;
mod sweep;
mod timeline;
mod timestamp;
mod what_if;

use std::sync::Arc;

use tidegate_core::Timestamp;

use self::{
    compare::Differences,
    replay::RuleSetReplay,
    stream::{Extraction, LogStream},
};
pub use self::{
    compare::{ComparedKey, Comparison},
    error::SimulateError,
    field::EntryMapping,
    format::LogFormat,
    frontier::{Frontier, FrontierPoint},
    html::as_html,
    input::{InputError, LogSource, MAX_LINE_BYTES, SimulationHandle},
    replay::RulesUnderTest,
    report::{
        LimitReport, LogLineCounts, Requests, RuleReport, SimulationReport, WorstKey, percent,
    },
    share::Share,
    stream::{DamagedLine, MAX_HELD, SORT_WINDOW},
    suggest::{Suggestion, as_yaml},
    sweep::{Candidates, MAX_SWEEP_VALUES, Sweep, SweepReport, SweepValue},
    timeline::Timeline,
    what_if::WhatIf,
};

/// Parses `text` in every format, for fuzzing. The detection of formats reads the same lines.
#[cfg(any(test, fuzzing))]
pub fn parse_in_every_format(text: &str) {
    format::parse_all(text);
}

/// The logs to be read.
#[derive(Clone, Debug, Default)]
pub struct Logs {
    /// The files.
    pub sources: Vec<LogSource>,
    /// The format of the logs.
    pub format: LogFormat,
    /// The mappings from log fields to entries, from `--entry`.
    pub mappings: Vec<EntryMapping>,
}

/// The rules files and options of a simulation.
#[derive(Clone, Copy, Debug)]
pub struct Simulation<'r> {
    /// The rules file.
    pub rules: &'r RulesUnderTest,
    /// If set, the decisions are also compared with the decisions of this other rules file.
    pub against: Option<&'r RulesUnderTest>,
    /// If set, the report suggests limits that deny at most this share of the keys.
    pub suggest: Option<Share>,
    /// If set, the requests are also decided with each of these alternative limits for one rule.
    pub sweep: Option<&'r Candidates>,
}

impl<'r> Simulation<'r> {
    /// Simulates `rules` alone.
    #[must_use]
    pub fn of(rules: &'r RulesUnderTest) -> Self {
        Self {
            rules,
            against: None,
            suggest: None,
            sweep: None,
        }
    }

    /// Decides the requests in `logs`.
    ///
    /// # Errors
    ///
    /// Returns [`SimulateError`] if a log cannot be read, or if a log's format is unknown. If a log
    /// is damaged after its first lines, the report only contains a warning.
    pub fn run(
        self,
        logs: &Logs,
        handle: &Arc<SimulationHandle>,
    ) -> Result<SimulationReport, SimulateError> {
        let mut stream = LogStream::open(&logs.sources, &logs.format, &logs.mappings, handle)?;
        let files = [Some(self.rules), self.against];
        let files = files.into_iter().flatten();
        let names = files.clone().flat_map(RulesUnderTest::response_names);
        let mut response: Vec<Box<str>> = names.map(Box::from).collect();
        response.sort_unstable();
        response.dedup();
        let extraction = Extraction {
            extractors: files.map(|rules| &rules.extractor).collect(),
            response,
        };
        let mut replay = RuleSetReplay::new(self.rules);
        if self.suggest.is_some() {
            replay.record_suggestions();
        }
        let mut other = self.against.map(RuleSetReplay::new);
        let mut candidates: Vec<RuleSetReplay<'_>> = self
            .sweep
            .map(|sweep| sweep.replays(self.rules))
            .unwrap_or_default();
        let mut differences = Differences::default();
        let mut now = Timestamp::default();
        while let Some(request) = stream.next(&extraction) {
            // The store's time must never go back, so a line that is too late to be sorted is
            // decided at the current simulated time.
            now = now.max(request.time);
            let decided = replay.decide(&request, 0, now);
            for candidate in &mut candidates {
                candidate.decide(&request, 0, now);
            }
            let other = other
                .as_mut()
                .and_then(|other| other.decide(&request, 1, now));
            match (decided, other) {
                (Some(new), Some(old)) => differences.count(new, old, now),
                (None, Some(_)) => differences.count_refused(),
                _ => {}
            }
        }
        let LogStream {
            counts, formats, ..
        } = stream;
        let mut report = SimulationReport::new(&replay, counts, formats, handle.is_interrupted());
        report.comparison = self
            .against
            .map(|other| differences.report(self.rules, other));
        report.sweep = self.sweep.map(|sweep| sweep.report(&candidates));
        if let Some(share) = self.suggest {
            report.suggestions = suggest::suggestions(&replay, share);
            report.frontier = frontier::frontiers(&replay, share);
        }
        Ok(report)
    }
}
