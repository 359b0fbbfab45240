//! The calls. The service is Tidegate itself, which applies limits that are part of the request.

use std::fmt::{self, Write as _};

use reqwest::{Client, StatusCode};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Error};
use tidegate_client::{NonIdempotent, Retried, Retry, RetryPolicy, ThrottleLayer, spaced};

/// Makes all calls, and returns a summary.
pub(crate) async fn all(server: &str) -> Result<String, Box<dyn std::error::Error>> {
    let plain = ClientBuilder::new(Client::new()).build();

    // The service counts per key, so each run uses keys of its own.
    let run = std::process::id();
    let mut lines = String::new();
    let deaf = Tally::of(&plain, server, &format!("deaf-{run}"), ("1/min", 0), 5).await?;
    writeln!(lines, "As they come:   {deaf}")?;

    // A refused request has not been counted, so it may be sent again although it is a POST.
    let policy = RetryPolicy {
        non_idempotent: NonIdempotent::Refused,
        ..RetryPolicy::default()
    };
    let patient = ClientBuilder::new(Client::new())
        .with(Retry::new(policy))
        .build();
    let retried = Tally::of(&patient, server, &format!("patient-{run}"), ("1/2s", 0), 2).await?;
    writeln!(lines, "With retries:   {retried}")?;

    // Evenly sent requests may arrive less evenly, so the service allows a burst.
    let even = ClientBuilder::new(Client::new())
        .with(ThrottleLayer::new(spaced("4/s")?))
        .build();
    let throttled = Tally::of(&even, server, &format!("even-{run}"), ("4/s", 7), 10).await?;
    writeln!(lines, "Self-throttled: {throttled}")?;
    Ok(lines)
}

/// Counts of the outcomes.
#[derive(Debug, Default)]
struct Tally {
    passed: u32,
    refused: u32,
    sent_again: u32,
}

impl Tally {
    async fn of(
        client: &ClientWithMiddleware,
        server: &str,
        key: &str,
        (rate, burst): (&str, u32),
        requests: u32,
    ) -> Result<Self, Error> {
        let mut tally = Self::default();
        for _ in 0..requests {
            let question = format!(
                r#"{{"key": "{key}", "algorithm": "gcra", "rate": "{rate}", "burst": {burst}}}"#
            );
            let request = client.post(format!("{server}/v1/throttle"));
            let request = request.header("content-type", "application/json");
            let answer = request.body(question).send().await?;
            match answer.status() {
                StatusCode::OK => tally.passed += 1,
                _ => tally.refused += 1,
            }
            let tries = answer
                .extensions()
                .get::<Retried>()
                .map_or(1, |told| told.tries);
            tally.sent_again += tries - 1;
        }
        Ok(tally)
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            passed,
            refused,
            sent_again,
        } = self;
        write!(
            f,
            "{passed} passed, {refused} refused, {sent_again} sent again"
        )
    }
}
