//! Records requests to a file, as input for simulations (`record`).
//!
//! Each line is a JSON object:
//!
//! ```text
//! {"time":1700000000.000123,"cost":1,"allowed":true,"entries":{"ip":"203.0.113.9","path":"/login"}}
//! ```
//!
//! A separate thread writes the file. If the thread falls behind, requests are dropped and counted.

use std::{cell::Cell, hash::BuildHasher as _, io};

use foldhash::quality::FixedState;
use tidegate::DecidedRequest;
use tidegate_config::RecordConfig;
use tidegate_core::{Verdict, bounds::MAX_LOG_LINE_BYTES};
use tidegate_net::{
    line_log::{LineLog, LineLogSettings},
    prometheus::{Metric, Page},
};

use crate::KeyMask;

const LOST: Metric = Metric::counter(
    "tidegate_record_dropped_total",
    [],
    "Requests that were not recorded, because the file could not be written fast enough, or because a line would have been longer than 1 MiB.",
);

/// The seed of the hashes that select the sample. The seed is fixed, so that all servers select the
/// same values.
const SAMPLE_SEED: u64 = 0x7469_6465_6761_7465;

/// Records requests to a file.
#[derive(Debug)]
pub struct RequestRecorder {
    lines: LineLog,
    settings: RecordConfig,
    mask: KeyMask,
}

impl RequestRecorder {
    /// Opens the file in `settings`. `mask` hashes the values of the entries that `settings.hash`
    /// names.
    ///
    /// # Errors
    ///
    /// Returns the operating system's error if the file cannot be opened or the thread cannot be
    /// started.
    pub fn open(settings: RecordConfig, mask: KeyMask) -> io::Result<Self> {
        let lines = LineLog::open(LineLogSettings {
            name: "record",
            path: Some(settings.to.clone()),
            // Rotation keeps one older file of the same size, so each of the two files may use half
            // of the maximum.
            rotate_at: Some(settings.max_bytes as u64 / 2),
        })?;
        Ok(Self {
            lines,
            settings,
            mask,
        })
    }

    /// Records a request that received `verdict`, if the request is in the sample.
    pub(crate) fn record(&self, decided: DecidedRequest<'_>, verdict: &Verdict<'_>) {
        if self.is_in_sample(decided) {
            let line = self.line(decided, verdict);
            // A simulation would skip a longer line.
            if line.len() <= MAX_LOG_LINE_BYTES {
                self.lines.write(line);
            } else {
                self.lines.count_lost();
            }
        }
    }

    fn is_in_sample(&self, decided: DecidedRequest<'_>) -> bool {
        let percent = u64::from(self.settings.sample_percent);
        if percent >= 100 {
            return true;
        }
        let by = self.settings.by.as_deref();
        // Requests without the entry are sampled individually. A shared hash would select either
        // all or none of these requests.
        let number = match by.and_then(|by| decided.request.entry(by)) {
            Some(value) => FixedState::with_seed(SAMPLE_SEED).hash_one(value),
            None => next_number(),
        };
        // The multiplication maps `number` evenly to 0..100.
        (u128::from(number) * 100) >> 64 < u128::from(percent)
    }

    fn line(&self, decided: DecidedRequest<'_>, verdict: &Verdict<'_>) -> String {
        let micros = decided.now.as_micros();
        let (seconds, rest) = (micros / 1_000_000, micros % 1_000_000);
        let mut line = format!(
            "{{\"time\":{seconds}.{rest:06},\"cost\":{},\"allowed\":{},\"entries\":{{",
            decided.request.cost().units(),
            verdict.allowed
        );
        for (at, (name, value)) in decided.request.entries().iter().enumerate() {
            if at > 0 {
                line.push(',');
            }
            let is_hashed =
                is_credential(name) || self.settings.hash.iter().any(|hashed| hashed == name);
            push_json(&mut line, name);
            line.push(':');
            if is_hashed {
                push_json(&mut line, &self.mask.value(value));
            } else {
                push_json(&mut line, value);
            }
        }
        line.push_str("}}\n");
        line
    }

    /// Reopens the file before the next line is written. Call this method after another program,
    /// such as logrotate, has moved the file.
    pub fn reopen(&self) {
        self.lines.reopen();
    }

    /// Waits until the requests recorded so far are written, for at most 2 seconds.
    pub fn finish(&self) {
        self.lines.finish();
    }

    pub(crate) fn collect(&self, page: &mut Page<'_>) {
        page.single(&LOST, self.lines.lost());
    }
}

/// Returns whether the values of the entry `name` are usually credentials. Credentials must not be
/// written to a file.
fn is_credential(name: &str) -> bool {
    matches!(
        name,
        "header.authorization"
            | "header.proxy-authorization"
            | "header.cookie"
            | "header.x-api-key"
    ) || name.starts_with("cookie.")
}

/// Appends `text` as a JSON string.
fn push_json(line: &mut String, text: &str) {
    // Serialisation of a string to memory never fails.
    line.push_str(&serde_json::to_string(text).unwrap_or_default());
}

/// Returns the next pseudo-random number of this thread (SplitMix64).
fn next_number() -> u64 {
    thread_local! {
        static STATE: Cell<u64> = Cell::new(foldhash::fast::RandomState::default().hash_one(0_u8));
    }
    STATE.with(|state| {
        let next = state.get().wrapping_add(0x9E37_79B9_7F4A_7C15);
        state.set(next);
        let mixed = (next ^ (next >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    })
}

#[cfg(test)]
mod tests {
    use tidegate_core::{Cost, Request, RuleSet, Timestamp};

    use super::*;

    const NOW: Timestamp = Timestamp::from_micros(1_700_000_000_000_123);

    /// Records `requests`, which are values of the entry `ip`, and returns the lines.
    fn recorded(adjust: impl FnOnce(&mut RecordConfig), ips: &[String]) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        let mut settings = RecordConfig {
            to: folder.path().join("requests"),
            sample_percent: 100,
            by: None,
            hash: Vec::new(),
            max_bytes: 1 << 20,
        };
        adjust(&mut settings);
        let path = settings.to.clone();
        let recorder = RequestRecorder::open(settings, KeyMask::hashed(b"secret")).unwrap();
        let rules = RuleSet::default();
        for ip in ips {
            let entries = [("ip", ip.as_str()), ("path", "/\"a\"\n")];
            let request = Request::new(&entries, Cost::new(3).unwrap()).unwrap();
            let decided = DecidedRequest {
                request: &request,
                rules: &rules,
                now: NOW,
            };
            recorder.record(decided, &Verdict::unlimited());
        }
        recorder.finish();
        let text = std::fs::read_to_string(path).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    fn ips() -> Vec<String> {
        (0..10_000)
            .map(|at| format!("10.0.{}.{}", at / 200 % 50, at % 200))
            .collect()
    }

    #[test]
    fn a_line_has_the_time_the_cost_the_answer_and_the_entries() {
        let ip = ["203.0.113.9".to_owned()];
        let plain = recorded(|_| {}, &ip);
        let expected = r#"{"time":1700000000.000123,"cost":3,"allowed":true,"entries":{"ip":"203.0.113.9","path":"/\"a\"\n"}}"#;
        assert_eq!(plain, [expected]);
        let hashed = recorded(|settings| settings.hash = vec!["ip".to_owned()], &ip);
        assert!(hashed[0].contains(r#""ip":"hash:"#), "{hashed:?}");
        assert!(!hashed[0].contains("203.0.113.9"), "{hashed:?}");
    }

    #[test]
    fn credentials_are_always_hashed() {
        for name in [
            "header.authorization",
            "header.cookie",
            "cookie.session",
            "header.x-api-key",
        ] {
            assert!(is_credential(name), "{name}");
        }
        for name in ["ip", "header.host", "customer", "query.page"] {
            assert!(!is_credential(name), "{name}");
        }
    }

    #[test]
    fn a_sample_of_values_has_all_requests_of_each_value() {
        let twice = [ips(), ips()].concat();
        let by_ip = |settings: &mut RecordConfig| {
            settings.sample_percent = 10;
            settings.by = Some("ip".to_owned());
        };
        let mut lines = recorded(by_ip, &twice);
        let count = lines.len();
        // For a binomial distribution, the tolerance of 300 in 10,000 is ten standard deviations.
        assert!((2 * 700..=2 * 1_300).contains(&count), "{count}");
        lines.sort();
        assert!(lines.chunks(2).all(|pair| pair[0] == pair[1]));
    }

    #[test]
    fn a_sample_of_requests_has_about_the_share() {
        let count = recorded(|settings| settings.sample_percent = 10, &ips()).len();
        assert!((700..=1_300).contains(&count), "{count}");
    }
}
