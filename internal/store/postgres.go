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

// openPostgres opens the database of a URL. No error of its connections holds
// the URL: the library's have it, or the whole configuration with the password,
// in fields that somebody who unwraps or prints them finds.
func openPostgres(source string) (*sql.DB, error) {
	c, err := pgx.ParseConfig(source)
	// A password with an @ that is not escaped: its end is taken for the host, and
	// told by the error of whoever looks that up.
	if err != nil || hasAt(c) {
		// Not even the reason: it quotes what it cannot read, which may be the password.
		return nil, fmt.Errorf("open database %s: it is not a URL that PostgreSQL's clients understand; want postgres://USER:PASSWORD@HOST:PORT/NAME, with reserved characters of the password written as %%XX", Redact(source))
	}
	return sql.OpenDB(sealed{stdlib.GetConnector(*c), c.Password}), nil
}

func hasAt(c *pgx.ConnConfig) bool {
	at := strings.Contains(c.Host, "@")
	for _, f := range c.Fallbacks {
		at = at || strings.Contains(f.Host, "@")
	}
	return at
}

// sealed is a connector whose errors do not hold the password.
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

// seal returns an error that reads as err does and unwraps to nothing of it but
// what says no more than why: the end of a context, a broken connection, what the
// server answered.
func (s sealed) seal(err error) error {
	text := err.Error()
	if len(s.password) >= 6 { // a shorter one is in many words, and not told by these
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

// A connectError is why there is no connection to the database.
type connectError struct {
	text string
	why  []error
}

func (e *connectError) Error() string   { return e.text }
func (e *connectError) Unwrap() []error { return e.why }

// Redact returns source without what a PostgreSQL URL may hold in secret: a
// password, and the parameters, of which some are. What is no proper URL it
// does not show at all.
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
