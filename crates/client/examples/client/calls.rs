//! The calls of the example. The rate-limited service is a Tidegate server, and each request
//! contains the limits that the server applies.

use std::fmt::{self, Write as _};

use reqwest::{Client, Response, StatusCode};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Error};
use tidegate_client::{
    NonIdempotentPolicy, RetryLayer, RetryPolicy, RetryReport, ThrottleLayer, spaced,
};

/// Makes all calls, and returns a summary.
pub(crate) async fn all(server: &str) -> Result<String, Box<dyn std::error::Error>> {
    let plain = ClientBuilder::new(Client::new()).build();
    let mut lines = String::new();
    let series = Series {
        name: "plain",
        rate: "1/min",
        burst: 0,
        requests: 5,
    };
    let tally = series.run(&plain, server).await?;
    writeln!(lines, "As they come:   {tally}")?;

    // A refused request was not counted, so it can safely be sent again, although it is a POST.
    let policy = RetryPolicy {
        non_idempotent: NonIdempotentPolicy::Refused,
        ..RetryPolicy::default()
    };
    let retrying = ClientBuilder::new(Client::new())
        .with(RetryLayer::new(policy))
        .build();
    let series = Series {
        name: "retrying",
        rate: "1/2s",
        burst: 0,
        requests: 2,
    };
    let tally = series.run(&retrying, server).await?;
    writeln!(lines, "With retries:   {tally}")?;

    let throttled = ClientBuilder::new(Client::new())
        .with(ThrottleLayer::new(spaced("4/s")?))
        .build();
    // The client sends the requests evenly spaced, but the network may deliver them less evenly.
    // Therefore, the service allows a burst.
    let series = Series {
        name: "throttled",
        rate: "4/s",
        burst: 7,
        requests: 10,
    };
    let tally = series.run(&throttled, server).await?;
    writeln!(lines, "Self-throttled: {tally}")?;
    Ok(lines)
}

/// A series of requests to which the service applies one limit.
struct Series {
    name: &'static str,
    rate: &'static str,
    burst: u32,
    requests: u32,
}

/// The number of requests with each outcome.
#[derive(Debug, Default)]
struct Tally {
    passed: u32,
    refused: u32,
    sent_again: u32,
}

impl Series {
    async fn run(&self, client: &ClientWithMiddleware, server: &str) -> Result<Tally, Error> {
        let Self {
            name, rate, burst, ..
        } = self;
        // The service counts per key. Each run of the example uses its own key, so that runs do not
        // affect each other.
        let key = format!("{name}-{}", std::process::id());
        let body = format!(
            r#"{{"key": "{key}", "algorithm": "gcra", "rate": "{rate}", "burst": {burst}}}"#
        );
        let mut tally = Tally::default();
        for _ in 0..self.requests {
            let request = client.post(format!("{server}/v1/throttle"));
            let request = request.header("content-type", "application/json");
            tally.count(&request.body(body.clone()).send().await?);
        }
        Ok(tally)
    }
}

impl Tally {
    fn count(&mut self, response: &Response) {
        match response.status() {
            StatusCode::OK => self.passed += 1,
            _ => self.refused += 1,
        }
        let report = response.extensions().get::<RetryReport>();
        self.sent_again += report.map_or(1, |report| report.tries) - 1;
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
