//! The admin door: health, metrics, and the operator's hand on blocks, keys and rules.
//!
//! | path | what |
//! | --- | --- |
//! | `GET /healthz` | the process answers |
//! | `GET /readyz` | it can decide, and how the last reload ended |
//! | `GET /metrics` | Prometheus text |
//! | `GET /v1/blocks` | the blocks that stand |
//! | `GET`, `PUT`, `DELETE /v1/blocks/{rule}/{key}` | one block |
//! | `GET`, `DELETE /v1/keys/{rule}/{key}` | how a key stands; forget what it has spent |
//! | `GET /v1/rules` | the rules in force |
//! | `POST /v1/reload` | read the rules file again |
//!
//! A key is the values of the rule's key entries in order, one percent-encoded path segment each.

mod access;
mod blocks;
mod keys;
mod path;
mod rules;

use std::{io, net::TcpListener, sync::Arc};

use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::Incoming,
    header::{CONTENT_TYPE, HeaderValue},
};
use serde_json::json;

use self::{access::Access, path::Path};
use super::http::{Answer, Problem, json, read_body, wire};
use crate::{
    limiter::Limiter,
    net::{Bounds, Listener, Server},
    reload::Reloader,
};

/// What the admin door needs.
#[derive(Debug)]
pub struct Operated {
    /// What is operated.
    pub limiter: Arc<Limiter>,
    /// What `POST /v1/reload` asks; without one there is no rules file.
    pub reloader: Option<Arc<Reloader>>,
    /// Who shows it may ask; without one, whoever is on this machine.
    pub token: Option<String>,
}

/// Answers the operator on `socket`.
///
/// # Errors
///
/// If other machines reach `socket` and there is no token; else what the system says if it is no
/// listening socket.
pub fn listen(
    server: &Server,
    socket: TcpListener,
    bounds: Bounds,
    operated: Operated,
) -> io::Result<Listener> {
    let Operated {
        limiter,
        reloader,
        token,
    } = operated;
    let admin = Arc::new(Admin {
        limiter,
        reloader,
        access: Access::new(token, socket.local_addr()?)?,
    });
    server.listen(socket, bounds, move |stream, connection| {
        let admin = Arc::clone(&admin);
        async move {
            wire::serve(stream, &connection, |request| admin.answer(request)).await;
        }
    })
}

#[derive(Debug)]
struct Admin {
    limiter: Arc<Limiter>,
    reloader: Option<Arc<Reloader>>,
    access: Access,
}

impl Admin {
    async fn answer(&self, request: Request<Incoming>) -> Answer {
        let answered = match self.access.check(&request) {
            Ok(()) => self.route(request).await,
            Err(problem) => Err(problem),
        };
        answered.unwrap_or_else(Problem::answer)
    }

    async fn route(&self, request: Request<Incoming>) -> Result<Answer, Problem> {
        let path = Path::parse(request.uri().path())?;
        let method = match request.method() {
            // hyper leaves the body away.
            &Method::HEAD => Method::GET,
            method => method.clone(),
        };
        let segments: Vec<&str> = path.segments().collect();
        match (segments.as_slice(), &method) {
            (["healthz"], &Method::GET) => Ok(json(StatusCode::OK, &json!({"ok": true}))),
            (["readyz"], &Method::GET) => Ok(self.readiness()),
            (["metrics"], &Method::GET) => Ok(self.metrics()),
            (["v1", "rules"], &Method::GET) => Ok(rules::list(&self.limiter)),
            (["v1", "reload"], &Method::POST) => self.reload().await,
            (["v1", "blocks"], &Method::GET) => Ok(blocks::list(&self.limiter)),
            (["v1", "blocks", rule, key @ ..], &Method::GET) => {
                blocks::show(&self.limiter, rule, key)
            }
            (["v1", "blocks", rule, key @ ..], &Method::PUT) => {
                let body = read_body(request.into_body()).await?;
                blocks::put(&self.limiter, rule, key, &body)
            }
            (["v1", "blocks", rule, key @ ..], &Method::DELETE) => {
                blocks::lift(&self.limiter, rule, key)
            }
            (["v1", "keys", rule, key @ ..], &Method::GET) => keys::show(&self.limiter, rule, key),
            (["v1", "keys", rule, key @ ..], &Method::DELETE) => {
                keys::reset(&self.limiter, rule, key)
            }
            (["healthz" | "readyz" | "metrics"] | ["v1", "rules" | "blocks"], _) => {
                Err(Problem::method("GET"))
            }
            (["v1", "reload"], _) => Err(Problem::method("POST")),
            (["v1", "blocks", ..], _) => Err(Problem::method("GET, PUT, DELETE")),
            (["v1", "keys", _, ..], _) => Err(Problem::method("GET, DELETE")),
            _ => Err(Problem::not_found(
                "/healthz, /readyz, /metrics, /v1/blocks, /v1/keys/{rule}/{key}, /v1/rules and /v1/reload",
            )),
        }
    }

    fn readiness(&self) -> Answer {
        let failed = self.limiter.metrics().last_reload_failed();
        let last_reload = if failed {
            "failed; the old rules are in force"
        } else {
            "ok"
        };
        let mistakes = self
            .reloader
            .as_ref()
            .map(|reloader| reloader.last_mistakes())
            .unwrap_or_default();
        json(
            StatusCode::OK,
            &json!({"ready": true, "last_reload": last_reload, "mistakes": mistakes}),
        )
    }

    fn metrics(&self) -> Answer {
        let mut answer = Response::new(Full::from(self.limiter.exposition()));
        let text = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
        answer.headers_mut().insert(CONTENT_TYPE, text);
        answer
    }

    async fn reload(&self) -> Result<Answer, Problem> {
        let Some(reloader) = self.reloader.clone() else {
            return Err(Problem::new(
                StatusCode::CONFLICT,
                "there is no rules file; start with --config FILE",
            ));
        };
        // A large file takes a while to read, and this worker has others to answer meanwhile.
        let reloaded = tokio::task::spawn_blocking(move || reloader.reload()).await;
        match reloaded {
            Ok(Ok(rules)) => Ok(json(StatusCode::OK, &json!({"rules": rules}))),
            Ok(Err(error)) => {
                let detail = "the rules file cannot be used; the old rules are in force";
                Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, detail)
                    .with_mistakes(error.problems()))
            }
            Err(_) => Err(Problem::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "the server is shutting down",
            )),
        }
    }
}
