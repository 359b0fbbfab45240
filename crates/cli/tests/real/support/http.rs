//! A simple HTTP client.

use std::{net::SocketAddr, thread, time::Duration};

use serde_json::Value;
use ureq::http::{HeaderMap, Method, Request};

/// A response.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error} in: {}", self.body))
    }

    /// Returns the value of a header; empty if it is absent.
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .map_or("", |value| value.to_str().unwrap())
    }
}

/// A request builder.
#[derive(Debug)]
pub(crate) struct Ask {
    method: Method,
    url: String,
    headers: Vec<(String, String)>,
    body: String,
}

impl Ask {
    pub(crate) fn new(method: &str, address: SocketAddr, path: &str) -> Self {
        Self {
            method: method.parse().unwrap(),
            url: format!("http://{address}{path}"),
            headers: Vec::new(),
            body: String::new(),
        }
    }

    pub(crate) fn get(address: SocketAddr, path: &str) -> Self {
        Self::new("GET", address, path)
    }

    pub(crate) fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    pub(crate) fn body(mut self, body: &Value) -> Self {
        self.body = body.to_string();
        self.header("content-type", "application/json")
    }

    pub(crate) fn send(self) -> Answer {
        let agent: ureq::Agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            // Return redirects instead of following them.
            .max_redirects(0)
            .timeout_global(Some(Duration::from_secs(30)))
            .build()
            .into();
        let mut request = Request::builder().method(&self.method).uri(&self.url);
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        let mut response = agent
            .run(request.body(self.body).unwrap())
            .unwrap_or_else(|error| panic!("{} {}: {error}", self.method, self.url));
        Answer {
            status: response.status().as_u16(),
            headers: response.headers().clone(),
            body: response.body_mut().read_to_string().unwrap(),
        }
    }
}

/// The clients of `count_admitted`.
const CLIENTS: usize = 8;

/// Sends `requests` requests, distributed over several clients that send at the same time, and
/// returns how many got the status 200. `ask` gets the number of the client.
pub(crate) fn count_admitted(requests: usize, ask: impl Fn(usize) -> Ask + Sync) -> usize {
    let client = |number| {
        let statuses = (0..requests / CLIENTS).map(|_| ask(number).send().status);
        statuses.filter(|status| *status == 200).count()
    };
    let client = &client;
    thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|number| scope.spawn(move || client(number)))
            .collect();
        let admitted = clients.into_iter().map(|client| client.join().unwrap());
        admitted.sum()
    })
}
