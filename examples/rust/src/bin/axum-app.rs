//! An axum application with a built-in limiter. `axum-app [ADDRESS [REDIS_URL]]`

use std::{error::Error, net::SocketAddr, sync::Arc};

use axum::{
    Router,
    extract::{ConnectInfo, Request},
    http::StatusCode,
    middleware::{self, Next},
    response::Response,
    routing::{get, post},
};
use tidegate::{Clock, Limiter};
use tidegate_core::{Condition, Pattern, ResponseCost, Rule, RuleSet, Store, When};
use tidegate_examples::{in_memory, in_redis, limit};
use tidegate_tower::{RateLimitLayer, identity::Entries};
use tokio::net::TcpListener;

/// The limits are three failed logins a minute per address, and five API requests a minute per
/// customer.
fn rules() -> Result<RuleSet, Box<dyn Error>> {
    let path = |path| Condition::new("path", Pattern::text(path)?);
    let refused = Condition::new("status", Pattern::text("401")?)?;
    let login = Rule::new("login", vec![limit("3/min")?])?
        .when(When::all(vec![path("/login")?]))
        .keyed_by(&["ip"])?
        .with_response_cost(ResponseCost::default().counting(When::all(vec![refused])))?;
    let api = Rule::new("api", vec![limit("5/min")?])?
        .when(When::all(vec![path("/api/**")?]))
        .keyed_by(&["customer"])?;
    Ok(RuleSet::build(vec![login, api], Vec::new())?)
}

/// Adds the verified customer as an entry for the limiter. The limiter runs after this middleware.
async fn authenticate(mut request: Request, next: Next) -> Response {
    let token = request.headers().get("authorization");
    if token.is_some_and(|token| token == "Bearer acme-secret") {
        let known = Entries::new().with("customer", "acme");
        request.extensions_mut().insert(known);
    }
    next.run(request).await
}

async fn login(password: String) -> (StatusCode, &'static str) {
    match password.as_str() {
        "sesame" => (StatusCode::OK, "welcome\n"),
        _ => (StatusCode::UNAUTHORIZED, "wrong\n"),
    }
}

async fn serve(listener: TcpListener, store: impl Store + 'static) -> Result<(), Box<dyn Error>> {
    let limiter = Arc::new(Limiter::new(rules()?, store, Clock::real()));
    let limits = RateLimitLayer::new(limiter)
        .peer(|extensions| Some(extensions.get::<ConnectInfo<SocketAddr>>()?.0.ip()));
    let app = Router::new()
        .route("/login", post(login))
        .route("/api/orders", get(|| async { "no orders\n" }))
        .layer(limits)
        // The layer added last runs first. The limiter needs the entry that this layer adds.
        .layer(middleware::from_fn(authenticate));
    let app = app.into_make_service_with_connect_info::<SocketAddr>();
    Ok(axum::serve(listener, app).await?)
}

#[tokio::main]
#[expect(clippy::print_stdout, reason = "the application prints its address")]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments
        .next()
        .unwrap_or_else(|| "127.0.0.1:3000".to_owned());
    let listener = TcpListener::bind(address).await?;
    println!("listening on {}", listener.local_addr()?);
    match arguments.next() {
        None => serve(listener, in_memory()).await,
        Some(url) => serve(listener, in_redis(&url)?).await,
    }
}
