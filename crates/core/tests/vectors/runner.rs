//! The runner, which runs the test vector cases against a [`Subject`]: a system under test that
//! decides requests.
//!
//! A store or a listener that supports the features of a case implements [`Subject`].
//! [`folder::run`](super::folder::run) runs the cases.

use tidegate_core::{
    Charge, Cost, Effect, LimitSpec, Limits, RetryAfter, Span, Timestamp, Verdict,
};

use super::{
    compare::compare,
    format::{self, Case, Generate, LimitFields, Op, RequestFields, Totals},
    prediction::{Instants, Prediction},
};

/// A system under test.
pub(crate) trait Subject {
    /// The resolution of the responses. Wait times are rounded up to the resolution.
    const PRECISION: Span = Span::from_micros(1);

    /// The instants of a `generate` operation at which a request is sent to the system under test.
    const INSTANTS: Instants = Instants::Every;

    /// Decides one request. If the result is an `Err`, the case fails.
    fn answer(&mut self, ask: &Ask<'_>) -> Result<Answer, String>;

    /// Blocks `key` for `span`.
    fn block(&mut self, key: &str, span: Span, now: Timestamp) -> Result<(), String>;

    /// Removes the block on `key`.
    fn unblock(&mut self, key: &str, now: Timestamp) -> Result<(), String>;

    /// Resets the state of `key`.
    fn reset(&mut self, key: &str, now: Timestamp) -> Result<(), String>;

    /// Returns the reason for rejecting the limit, beginning with the name of the field, or `None`
    /// if the limit is accepted.
    fn refusal_of_limit(&mut self, fields: &LimitFields) -> Option<String> {
        limit_of(fields).err()
    }

    /// Returns the reason for rejecting the request, beginning with the name of the field, or
    /// `None` if the request is accepted.
    fn refusal_of_request(&mut self, fields: &RequestFields) -> Option<String> {
        refuse_request(fields).err()
    }
}

/// A request of a case.
pub(crate) struct Ask<'a> {
    /// The limits, compiled.
    #[allow(dead_code, reason = "for stores, which take them compiled")]
    pub(crate) limits: &'a Limits,
    /// The limits as written in the test vector file, before they are compiled.
    #[allow(
        dead_code,
        reason = "for listeners that take the limits in the request"
    )]
    pub(crate) fields: &'a [LimitFields],
    pub(crate) key: &'a str,
    pub(crate) cost: Cost,
    pub(crate) now: Timestamp,
    pub(crate) effect: Effect,
}

/// The response of the system under test. Fields that the system does not report are `None` and are
/// not compared.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) allowed: bool,
    pub(crate) reason: Option<String>,
    pub(crate) over_limit: Option<bool>,
    /// The minimum of the remaining units over all limits. Also `None` if no limit was evaluated.
    pub(crate) remaining: Option<u64>,
    /// The longest wait time over all limits that deny the request.
    pub(crate) retry: RetryAfter,
    /// The time until the tightest limit is fully available again. Also `None` if no limit was
    /// evaluated.
    pub(crate) reset: Option<Span>,
    pub(crate) delay: Option<Span>,
}

impl Answer {
    /// Converts a verdict to a response.
    #[allow(dead_code, reason = "for stores; the response of a listener is parsed")]
    pub(crate) fn of(verdict: &Verdict<'_>) -> Self {
        let outcomes = || verdict.lines.iter().map(|line| line.outcome);
        Self {
            allowed: verdict.allowed,
            reason: verdict.reason.map(|reason| reason.as_str().to_owned()),
            over_limit: Some(outcomes().any(|outcome| outcome.over_limit)),
            remaining: outcomes().map(|outcome| outcome.remaining).min(),
            retry: verdict.retry_after,
            reset: verdict.leading().map(|line| line.outcome.reset_after),
            delay: Some(verdict.delay),
        }
    }
}

/// Runs one case. Returns a message for each failure, with the case, the operation, the expected
/// value and the actual value.
pub(crate) fn run_case<S: Subject>(case: &Case, subject: &mut S) -> Vec<String> {
    let mut run = Run::<S> {
        case,
        subject,
        failures: Vec::new(),
        allowed_at: Vec::new(),
        denied: 0,
    };
    if let Err(problem) = run.run() {
        run.failures.push(format!("{}: {problem}", case.id));
    }
    run.failures
}

/// Builds a limit from its fields. Errors begin with the name of the field.
pub(crate) fn limit_of(fields: &LimitFields) -> Result<tidegate_core::Limit, String> {
    fields.spec()?.build().map_err(|problems| {
        let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
        problems.join("; ")
    })
}

fn refuse_request(fields: &RequestFields) -> Result<(), String> {
    let cost = format::natural("cost", fields.cost)?.unwrap_or(1);
    let cost = Cost::new(cost).map_err(|problem| problem.to_string())?;
    let spec = LimitSpec::shorthand(
        tidegate_core::notation::rate("1/s").map_err(|error| error.to_string())?,
        tidegate_core::AlgorithmName::Gcra,
    );
    let limit = spec.build().map_err(|problems| format!("{problems:?}"))?;
    let limits = Limits::new(vec![limit]).map_err(|problem| problem.to_string())?;
    Charge::new(fields.key.as_bytes(), &limits, cost)
        .map(|_| ())
        .map_err(|problem| problem.to_string())
}

struct Run<'c, S> {
    case: &'c Case,
    subject: &'c mut S,
    failures: Vec<String>,
    /// The times at which requests were admitted, as offsets from the start of the case.
    allowed_at: Vec<Span>,
    denied: u64,
}

impl<S: Subject> Run<'_, S> {
    fn run(&mut self) -> Result<(), String> {
        let case = self.case;
        let decides = !case.ops.is_empty() || case.generate.is_some();
        if !decides && case.invalid.is_empty() && case.invalid_requests.is_empty() {
            return Err("asks for nothing".to_owned());
        }
        if decides {
            self.decide()?;
        }
        self.refuse();
        Ok(())
    }

    fn decide(&mut self) -> Result<(), String> {
        let case = self.case;
        let built: Result<Vec<_>, String> = case.limits.iter().map(limit_of).collect();
        let limits = Limits::new(built?).map_err(|problem| problem.to_string())?;
        let start = case.start()?;
        for (index, op) in case.ops.iter().enumerate() {
            self.operate(&limits, start, op)
                .map_err(|problem| format!("op {index}: {problem}"))?
                .into_iter()
                .for_each(|failure| {
                    self.failures
                        .push(format!("{}: op {index}: {failure}", case.id));
                });
        }
        if let Some(generate) = &case.generate {
            self.generate(&limits, start, generate)?;
        }
        if let Some(totals) = &case.totals {
            self.failures.extend(self.compare_totals(totals));
        }
        Ok(())
    }

    /// Runs the operation `op` and returns the unmet expectations.
    fn operate(
        &mut self,
        limits: &Limits,
        start: Timestamp,
        op: &Op,
    ) -> Result<Vec<String>, String> {
        let offset = op.offset()?;
        let (now, key) = (start.after(offset), self.key());
        if let Some(millis) = op.block_ms {
            self.subject.block(&key, Span::from_millis(millis), now)?;
        }
        if op.unblock {
            self.subject.unblock(&key, now)?;
        }
        if op.reset {
            self.subject.reset(&key, now)?;
        }
        if op.block_ms.is_some() || op.unblock || op.reset {
            let bare = op.allowed.is_none() && op.remaining.is_none() && op.repeat.is_none();
            return if bare {
                Ok(Vec::new())
            } else {
                Err("an operation is either a request or an action".to_owned())
            };
        }
        let effect = if op.peek {
            Effect::Peek
        } else {
            Effect::Charge
        };
        let repeat = op.repeat.unwrap_or(1);
        let mut failures = Vec::new();
        for repetition in 1..=repeat {
            let answer = self.ask(limits, now, op.cost.unwrap_or(1), effect)?;
            if effect == Effect::Charge {
                self.count(&answer, offset);
            }
            if repetition == repeat {
                failures.extend(compare(op, &answer, S::PRECISION)?);
            } else if op.allowed.is_some_and(|allowed| allowed != answer.allowed) {
                failures.push(format!(
                    "repetition {repetition}: allowed: expected {:?}, got {}",
                    op.allowed, answer.allowed
                ));
            }
        }
        Ok(failures)
    }

    fn generate(
        &mut self,
        limits: &Limits,
        start: Timestamp,
        generate: &Generate,
    ) -> Result<(), String> {
        let cost = generate.cost.unwrap_or(1);
        let mut prediction = Prediction::new(S::INSTANTS, S::PRECISION, &self.case.limits);
        for offset in generate.offsets()? {
            let now = start.after(offset);
            if prediction.is_certain(now) {
                self.denied += 1;
                continue;
            }
            let answer = self.ask(limits, now, cost, Effect::Charge)?;
            if let Some(failure) = prediction.check(now, &answer) {
                let id = &self.case.id;
                self.failures.push(format!("{id}: at {offset}: {failure}"));
            }
            self.count(&answer, offset);
        }
        Ok(())
    }

    fn ask(
        &mut self,
        limits: &Limits,
        now: Timestamp,
        cost: u64,
        effect: Effect,
    ) -> Result<Answer, String> {
        let key = self.key();
        self.subject.answer(&Ask {
            limits,
            fields: &self.case.limits,
            key: &key,
            cost: Cost::new(cost).map_err(|problem| problem.to_string())?,
            now,
            effect,
        })
    }

    fn count(&mut self, answer: &Answer, offset: Span) {
        if answer.allowed {
            self.allowed_at.push(offset);
        } else {
            self.denied += 1;
        }
    }

    /// Returns a key that is unique to this case, so that cases can share a server.
    fn key(&self) -> String {
        format!("vector:{}", self.case.id)
    }

    fn compare_totals(&self, totals: &Totals) -> Vec<String> {
        let before = |end: Span| {
            self.allowed_at
                .iter()
                .filter(|offset| **offset < end)
                .count() as u64
        };
        let mut differences = Vec::new();
        let mut compare = |field: &str, expected: Option<u64>, got: u64| {
            if let Some(expected) = expected.filter(|expected| *expected != got) {
                let place = format!("{}: totals: {field}", self.case.id);
                differences.push(format!("{place}: expected {expected}, got {got}"));
            }
        };
        compare("allowed", totals.allowed, self.allowed_at.len() as u64);
        compare("denied", totals.denied, self.denied);
        compare(
            "first_second",
            totals.first_second,
            before(Span::from_secs(1)),
        );
        compare(
            "first_minute",
            totals.first_minute,
            before(Span::from_secs(60)),
        );
        compare(
            "first_hour",
            totals.first_hour,
            before(Span::from_secs(3_600)),
        );
        differences
    }

    fn refuse(&mut self) {
        for (index, fields) in self.case.invalid.iter().enumerate() {
            let refusal = self.subject.refusal_of_limit(fields);
            self.expect_field(
                &format!("invalid {index}"),
                refusal.as_deref(),
                &LimitSpec::FIELDS,
            );
        }
        for (index, fields) in self.case.invalid_requests.iter().enumerate() {
            let refusal = self.subject.refusal_of_request(fields);
            self.expect_field(
                &format!("invalid request {index}"),
                refusal.as_deref(),
                &["key", "cost"],
            );
        }
    }

    fn expect_field(&mut self, place: &str, refusal: Option<&str>, fields: &[&str]) {
        let names_field = |text: &str| fields.iter().any(|field| text.starts_with(field));
        if !refusal.is_some_and(names_field) {
            let id = &self.case.id;
            self.failures.push(format!(
                "{id}: {place}: expected a refusal that names the field, got {refusal:?}"
            ));
        }
    }
}
