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

// Verdict contains the fields of a /v1/check response that a service needs.
type Verdict struct {
	Allowed      *bool  `json:"allowed"`
	Reason       string `json:"reason"`
	RetryAfterMs *int64 `json:"retry_after_ms"` // nil for never
	DelayMs      int64  `json:"delay_ms"`       // above 0 only for a queue
	Header       http.Header
}

// ErrUncountable means that the client sent a value that cannot be counted, such as a long key.
var ErrUncountable = errors.New("the request cannot be counted")

// maxAnswer is larger than any response of the server, in bytes.
const maxAnswer = 1 << 20

// Check decides a request and charges its cost. An error means that there is no decision.
func (t *Tidegate) Check(ctx context.Context, entries map[string]string) (*Verdict, error) {
	body, err := json.Marshal(map[string]any{"entries": entries, "cost": 1})
	if err != nil {
		return nil, err
	}
	request, err := http.NewRequestWithContext(ctx, "POST", t.URL+"/v1/check", bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	if t.Token != "" {
		request.Header.Set("Tidegate-Token", t.Token)
	}
	response, err := t.Client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(response.Body, maxAnswer))
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

// Limit checks requests before it calls next. Without a decision, requests pass (fail open).
func Limit(t *Tidegate, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// Behind a proxy, take the address from the header that the proxy sets.
		ip, _, _ := net.SplitHostPort(r.RemoteAddr)
		entries := map[string]string{"method": r.Method, "path": r.URL.EscapedPath(), "ip": ip}
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
		for _, name := range []string{"RateLimit", "RateLimit-Policy", "Retry-After"} {
			if value := verdict.Header.Get(name); value != "" {
				w.Header().Set(name, value)
			}
		}
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
