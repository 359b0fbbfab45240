// A service that checks each request with Tidegate, using only the standard library.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"time"
)

// Tidegate is a client of a Tidegate server.
type Tidegate struct {
	URL    string // such as http://127.0.0.1:8080
	Token  string // empty if the listener has no token
	Client *http.Client
}

// Verdict contains the fields of a /v1/check or /v1/reserve response that a service needs.
type Verdict struct {
	Allowed      *bool  `json:"allowed"`
	Reason       string `json:"reason"`
	RetryAfterMs *int64 `json:"retry_after_ms"` // nil for never
	DelayMs      int64  `json:"delay_ms"`       // above 0 only for a queue
	Reservation  string `json:"reservation"`    // the token for Settle
	Header       http.Header
}

// ErrUncountable means that the client sent a value that cannot be counted, such as a long key.
var ErrUncountable = errors.New("the request cannot be counted")

// maxAnswer is larger than any response of the server, in bytes.
const maxAnswer = 1 << 20

// Check decides a request and charges its cost. An error means that there is no decision.
func (t *Tidegate) Check(ctx context.Context, entries map[string]string) (*Verdict, error) {
	return t.decide(ctx, "/v1/check", map[string]any{"entries": entries, "cost": 1})
}

// Reserve decides a request whose final cost is known only later, and charges the highest possible
// cost until Settle is called. An error means that there is no decision.
func (t *Tidegate) Reserve(ctx context.Context, entries map[string]string, cost int) (*Verdict, error) {
	return t.decide(ctx, "/v1/reserve", map[string]any{"entries": entries, "cost": cost, "ttl": "30s"})
}

// Settle replaces the cost of a reservation by the final cost.
func (t *Tidegate) Settle(ctx context.Context, reservation string, cost int) error {
	body := map[string]any{"reservation": reservation, "cost": cost}
	response, answer, err := t.post(ctx, "/v1/settle", body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("tidegate answered %s: %.200s", response.Status, answer)
	}
	return err
}

func (t *Tidegate) decide(ctx context.Context, path string, body map[string]any) (*Verdict, error) {
	response, answer, err := t.post(ctx, path, body)
	if err != nil {
		return nil, err
	}
	if response.StatusCode == http.StatusBadRequest {
		return nil, fmt.Errorf("%w: %.200s", ErrUncountable, answer)
	}
	verdict := &Verdict{Header: response.Header}
	err = json.Unmarshal(answer, verdict)
	if err != nil || verdict.Allowed == nil || *verdict.Allowed != (response.StatusCode == 200) {
		return nil, fmt.Errorf("tidegate answered %s: %.200s", response.Status, answer)
	}
	return verdict, nil
}

func (t *Tidegate) post(ctx context.Context, path string, body map[string]any) (*http.Response, []byte, error) {
	document, err := json.Marshal(body)
	if err != nil {
		return nil, nil, err
	}
	request, err := http.NewRequestWithContext(ctx, "POST", t.URL+path, bytes.NewReader(document))
	if err != nil {
		return nil, nil, err
	}
	if t.Token != "" {
		request.Header.Set("Tidegate-Token", t.Token)
	}
	response, err := t.Client.Do(request)
	if err != nil {
		return nil, nil, err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(response.Body, maxAnswer))
	return response, answer, err
}

// Limit checks requests before it calls next. Without a decision, requests pass (fail open).
func Limit(t *Tidegate, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		entries := entriesOf(r)
		if customer := r.Header.Get("X-Customer"); customer != "" {
			entries["customer"] = customer
		}
		verdict, err := t.Check(r.Context(), entries)
		if errors.Is(err, ErrUncountable) {
			http.Error(w, "bad request", http.StatusBadRequest)
			return
		}
		if err != nil {
			log.Printf("request admitted without a decision: %v", err)
			next.ServeHTTP(w, r)
			return
		}
		copyHeaders(w, verdict)
		if !*verdict.Allowed {
			deny(w, verdict)
			return
		}
		select {
		case <-time.After(time.Duration(verdict.DelayMs) * time.Millisecond):
			next.ServeHTTP(w, r)
		case <-r.Context().Done():
		}
	})
}

// Login limits failed logins. A login is reserved before the password is compared, so that parallel
// guesses cannot exceed the limit, and costs 1 only if it fails. Without a decision, logins are
// denied (fail closed).
func Login(t *Tidegate, isRight func(*http.Request) bool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		verdict, err := t.Reserve(r.Context(), entriesOf(r), 1)
		if errors.Is(err, ErrUncountable) {
			http.Error(w, "bad request", http.StatusBadRequest)
			return
		}
		if err != nil {
			log.Printf("login denied without a decision: %v", err)
			http.Error(w, "try again later", http.StatusServiceUnavailable)
			return
		}
		if !*verdict.Allowed {
			copyHeaders(w, verdict)
			deny(w, verdict)
			return
		}
		right := isRight(r)
		cost := 1
		if right {
			cost = 0
		}
		// The request's context ends if the client disconnects, but the login must be settled.
		if err := t.Settle(context.Background(), verdict.Reservation, cost); err != nil {
			log.Printf("login charged as failed: %v", err)
		}
		if !right {
			http.Error(w, "wrong password", http.StatusUnauthorized)
			return
		}
		fmt.Fprintln(w, "welcome")
	})
}

func entriesOf(r *http.Request) map[string]string {
	// Behind a proxy, take the address from the header that the proxy sets.
	ip, _, _ := net.SplitHostPort(r.RemoteAddr)
	return map[string]string{"method": r.Method, "path": r.URL.EscapedPath(), "ip": ip}
}

func copyHeaders(w http.ResponseWriter, verdict *Verdict) {
	for _, name := range []string{"RateLimit", "RateLimit-Policy", "Retry-After"} {
		if value := verdict.Header.Get(name); value != "" {
			w.Header().Set(name, value)
		}
	}
}

func deny(w http.ResponseWriter, verdict *Verdict) {
	status := http.StatusTooManyRequests
	if verdict.Reason == "store" {
		status = http.StatusServiceUnavailable
	}
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]any{
		"title":          http.StatusText(status),
		"status":         status,
		"retry_after_ms": verdict.RetryAfterMs,
	})
}

func main() {
	timeout, err := time.ParseDuration(env("TIDEGATE_TIMEOUT_MS", "500") + "ms")
	if err != nil {
		log.Fatal(err)
	}
	tidegate := &Tidegate{
		URL:   env("TIDEGATE_URL", "http://127.0.0.1:8080"),
		Token: os.Getenv("TIDEGATE_TOKEN"),
		Client: &http.Client{
			Timeout: timeout,
			// The default of 2 idle connections per host is too low for a busy service.
			Transport: &http.Transport{MaxIdleConnsPerHost: 100, IdleConnTimeout: time.Minute},
			// A redirect could send the token to another server.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}
	orders := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintln(w, "hello")
	})
	http.Handle("/api/orders", Limit(tidegate, orders))
	http.Handle("/login", Login(tidegate, func(r *http.Request) bool {
		return r.Header.Get("Password") == "open sesame"
	}))
	listener, err := net.Listen("tcp", "127.0.0.1:"+env("PORT", "3000"))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("listening on http://%s\n", listener.Addr())
	log.Fatal(http.Serve(listener, nil))
}

func env(name, otherwise string) string {
	if value := os.Getenv(name); value != "" {
		return value
	}
	return otherwise
}
