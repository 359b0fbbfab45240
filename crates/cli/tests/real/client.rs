//! Runs the client example against a real server.

use std::fs;

use crate::support::{Server, repository};

#[path = "../../../client/examples/client/calls.rs"]
mod calls;

/// The example must print the output that its README shows. The example waits exactly as long as
/// the server tells it to wait.
#[tokio::test]
async fn the_client_retries_when_allowed() {
    let server = Server::quickstart();
    let printed = calls::all(&format!("http://{}", server.http))
        .await
        .unwrap();
    let page = fs::read_to_string(repository().join("examples/client/README.md")).unwrap();
    assert!(
        page.contains(&format!("```text\n{printed}```")),
        "{printed}"
    );
}
