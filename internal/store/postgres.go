package store

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"net/url"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
)

// openPostgres opens the database of a URL. Errors of its connections never
// contain the password. Those of the library do, in fields that are visible to
// code that unwraps or prints them.
func openPostgres(source string) (*sql.DB, error) {
	c, err := pgx.ParseConfig(source)
	// An @ in a password that is not escaped: the rest of the password is parsed as
	// the host, and would be printed by the error of its lookup.
	if err != nil || hasAt(c) {
		// The parser's error is omitted: it quotes its input, which may be the password.
		return nil, fmt.Errorf("open database %s: not a valid PostgreSQL URL; want postgres://USER:PASSWORD@HOST:PORT/NAME, with reserved characters in the password written as %%XX", Redact(source))
	}
	return sql.OpenDB(sealed{stdlib.GetConnector(*c), c.Password}), nil
}

// hasAt reports whether a host contains an @, as after a password with an @ that
// is not escaped.
func hasAt(c *pgx.ConnConfig) bool {
	at := strings.Contains(c.Host, "@")
	for _, f := range c.Fallbacks {
		at = at || strings.Contains(f.Host, "@")
	}
	return at
}

// sealed is a connector whose errors do not contain the password.
type sealed struct {
	driver.Connector
	password string
}

// Connect implements [driver.Connector].
func (s sealed) Connect(ctx context.Context) (driver.Conn, error) {
	c, err := s.Connector.Connect(ctx)
	if err != nil {
		return nil, s.seal(err)
	}
	return c, nil
}

// seal returns an error with the text of err, without the password. It unwraps only
// to errors that cannot contain it: the end of a context, a broken connection, and
// the server's reply.
func (s sealed) seal(err error) error {
	text := err.Error()
	if len(s.password) >= 6 { // a shorter password occurs in ordinary words, and replacing it would garble the text
		for _, form := range []string{s.password, url.QueryEscape(s.password), url.PathEscape(s.password), url.UserPassword("", s.password).String()[1:]} {
			text = strings.ReplaceAll(text, form, "xxxxx")
		}
	}
	out := &connectError{text: text}
	for _, known := range []error{context.Canceled, context.DeadlineExceeded, driver.ErrBadConn} {
		if errors.Is(err, known) {
			out.why = append(out.why, known)
		}
	}
	if e, ok := errors.AsType[*pgconn.PgError](err); ok {
		out.why = append(out.why, &pgconn.PgError{Severity: e.Severity, Code: e.Code, Message: strings.ReplaceAll(text, "\n", " ")})
	}
	return out
}

// A connectError says why there is no connection to the database.
type connectError struct {
	text string
	why  []error
}

func (e *connectError) Error() string   { return e.text }
func (e *connectError) Unwrap() []error { return e.why }

// Redact returns source without the secrets that a PostgreSQL URL may contain: the
// password, and the parameters. Of a malformed URL it returns only the scheme.
func Redact(source string) string {
	if !isPostgres(source) {
		return source
	}
	u, err := url.Parse(source)
	if err != nil {
		return "postgres://…"
	}
	u.RawQuery, u.Fragment, u.RawFragment = "", "", ""
	return u.Redacted()
}
