package store

import (
	"context"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strings"
	"sync"
)

// ErrNoKey means that the database was opened without the server's key: its
// seals can be neither made nor checked.
var ErrNoKey = errors.New("the database was opened without the server's key (server.key in the data directory)")

// A sealer holds the key under which rows are sealed.
type sealer struct {
	key []byte

	newest *Memory // see Newest

	mu      sync.Mutex          // guards what follows
	columns map[string][]string // of each table, as the database lists them
}

// UseKey sets the server's key, of at least 32 bytes, from which the key for seals
// is derived. It is called once, before the first transaction that makes or checks
// a seal. Servers that share a database share the key.
func (db *DB) UseKey(server []byte) error {
	if len(server) < 32 {
		return fmt.Errorf("seal rows: the server's key has %d bytes, want 32 or more", len(server))
	}
	key, err := hkdf.Key(sha256.New, server, nil, "postern row seal v1", 32)
	if err != nil {
		return fmt.Errorf("derive key for seals: %w", err)
	}
	db.seals = &sealer{key: key, columns: map[string][]string{}, newest: db.NewMemory(0)}
	return nil
}

// Keyed reports whether seals can be made and checked.
func (tx *Tx) Keyed() bool { return tx.seals != nil }

// MAC returns the HMAC-SHA-256 of data for one purpose, under a key that is not in
// the database.
func (tx *Tx) MAC(purpose string, data []byte) ([]byte, error) {
	if tx.seals == nil {
		return nil, ErrNoKey
	}
	m := hmac.New(sha256.New, tx.seals.key)
	m.Write(binary.BigEndian.AppendUint32(nil, uint32(len(purpose))))
	m.Write([]byte(purpose))
	m.Write(data)
	return m.Sum(nil), nil
}

// Sealed reports whether seal is the MAC of data for a purpose. Without the server's key
// it is false.
func (tx *Tx) Sealed(purpose string, data, seal []byte) bool {
	want, err := tx.MAC(purpose, data)
	return err == nil && hmac.Equal(want, seal)
}

// Newest returns the largest value that this process has seen of a counter that
// only grows, n if it has seen none, and remembers n once tx is committed. It answers
// as [Memory.Newest] does; guard is the turn in which the counter grows. The attack: an
// earlier row is restored with its valid seal. The memory is that of the process: after
// a restart it starts with what it reads.
func (tx *Tx) Newest(guard Turn, name string, n int64) (int64, error) {
	if tx.seals == nil {
		return n, ErrNoKey
	}
	known, _ := tx.seals.newest.Newest(tx, guard, name)
	tx.seals.newest.Remember(tx, name, n)
	return max(known, n), nil
}

// A Sealed is a table whose rows carry a seal in their column seal: a MAC over
// every other column, by name. The attack: somebody who can write the database
// changes, inserts or swaps rows that decide what leaves.
//
// Zero and empty columns are not part of the MAC, so that a migration can add a
// column with such a default without breaking seals. A seal does not prove that a
// row is the newest version: earlier versions had valid seals as well.
type Sealed struct {
	Table string
	Key   []string // columns of the primary key
	Omit  []string // columns that the seal does not cover
	Only  []string // the columns that the seal covers, including the key; empty means all but Omit
}

// A SealedRow is one row of a [Sealed] table.
type SealedRow struct {
	Values map[string]any // by column: int64, string, []byte, float64, bool or nil
	Holds  bool           // the seal is valid for Values
}

// Rows returns the rows of s that match where, and whether their seals hold. With
// lock it locks the rows until tx ends.
func (tx *Tx) Rows(ctx context.Context, s Sealed, lock bool, where string, args ...any) (out []SealedRow, err error) {
	columns, err := tx.sealedColumns(ctx, s)
	if err != nil {
		return nil, err
	}
	list := strings.Join(columns, ", ") + ", seal"
	query := `select ` + list + ` from ` + s.Table + ` where ` + where
	if lock { // SQLite has no SELECT FOR UPDATE; an update that changes nothing works on both
		query = `update ` + s.Table + ` set seal = seal where ` + where + ` returning ` + list
	}
	scan := func(row func(...any) error) (SealedRow, error) {
		values, dest := make([]any, len(columns)+1), make([]any, len(columns)+1)
		for i := range values {
			dest[i] = &values[i]
		}
		if err := row(dest...); err != nil {
			return SealedRow{}, err
		}
		r := SealedRow{Values: make(map[string]any, len(columns))}
		for i, c := range columns {
			r.Values[c] = values[i]
		}
		want, err := tx.MAC(s.Table, s.encode(r.Values))
		got, ok := values[len(columns)].([]byte)
		r.Holds = ok && hmac.Equal(got, want) // NULL is not a seal
		return r, err
	}
	out, err = List(ctx, tx, scan, query, args...)
	if err != nil {
		return nil, fmt.Errorf("read sealed rows of %s: %w", s.Table, err)
	}
	return out, nil
}

// Holding reports whether the seals of all rows of s that match where hold.
func (tx *Tx) Holding(ctx context.Context, s Sealed, where string, args ...any) (bool, error) {
	rows, err := tx.Rows(ctx, s, false, where, args...)
	return !slices.ContainsFunc(rows, func(r SealedRow) bool { return !r.Holds }), err
}

// Broken returns how many rows of s have a seal that does not hold.
func (tx *Tx) Broken(ctx context.Context, s Sealed) (n int, err error) {
	rows, err := tx.Rows(ctx, s, false, `seal is null or seal is not null`)
	for _, r := range rows {
		if !r.Holds {
			n++
		}
	}
	return n, err
}

// Seal seals the rows of s that match where as they are now, in the
// transaction that has just written them.
func (tx *Tx) Seal(ctx context.Context, s Sealed, where string, args ...any) error {
	rows, err := tx.Rows(ctx, s, false, where, args...)
	if err != nil {
		return err
	}
	conds := make([]string, len(s.Key))
	for i, k := range s.Key {
		conds[i] = fmt.Sprintf("%s = $%d", k, i+2)
	}
	query := `update ` + s.Table + ` set seal = $1 where ` + strings.Join(conds, " and ")
	for _, r := range rows {
		if r.Holds {
			continue
		}
		mac, err := tx.MAC(s.Table, s.encode(r.Values))
		if err != nil {
			return err
		}
		values := []any{mac}
		for _, k := range s.Key {
			values = append(values, r.Values[k])
		}
		if _, err := tx.ExecContext(ctx, query, values...); err != nil {
			return fmt.Errorf("seal row of %s: %w", s.Table, err)
		}
	}
	return nil
}

// SealOf returns the seal of a row of s with these values, by column, for the statement
// that writes it. Columns that s does not cover are ignored, and columns that are left
// out must be zero or empty in the row.
func (tx *Tx) SealOf(s Sealed, values map[string]any) ([]byte, error) {
	row := make(map[string]any, len(values))
	for name, v := range values {
		if name == "seal" || slices.Contains(s.Omit, name) || len(s.Only) > 0 && !slices.Contains(s.Only, name) {
			continue
		}
		switch r := reflect.ValueOf(v); r.Kind() { // as the database returns it
		case reflect.String:
			row[name] = r.String()
		case reflect.Int, reflect.Int64:
			row[name] = r.Int()
		default:
			row[name] = v
		}
	}
	return tx.MAC(s.Table, s.encode(row))
}

// SealHolds reports whether seal is that of a row of s with these values, by column, as
// the database returned them in a larger query. They must be all that s covers.
func (tx *Tx) SealHolds(s Sealed, values map[string]any, seal any) bool {
	want, err := tx.MAC(s.Table, s.encode(values))
	got, ok := seal.([]byte)
	return err == nil && ok && hmac.Equal(got, want)
}

// sealedColumns returns the columns of s that its seal covers, as the database
// lists them, so that columns of later migrations are among them.
func (tx *Tx) sealedColumns(ctx context.Context, s Sealed) ([]string, error) {
	if tx.seals == nil {
		return nil, ErrNoKey
	}
	tx.seals.mu.Lock()
	defer tx.seals.mu.Unlock()
	if c, ok := tx.seals.columns[s.Table]; ok {
		return c, nil
	}
	all, err := tx.Columns(ctx, s.Table)
	if err != nil {
		return nil, err
	}
	c := slices.DeleteFunc(all, func(c string) bool {
		return c == "seal" || slices.Contains(s.Omit, c) || len(s.Only) > 0 && !slices.Contains(s.Only, c)
	})
	tx.seals.columns[s.Table] = c
	return c, nil
}

// Columns returns the names of a table's columns.
func (tx *Tx) Columns(ctx context.Context, table string) (_ []string, err error) {
	rows, err := tx.QueryContext(ctx, `select * from `+table+` limit 0`)
	if err != nil {
		return nil, fmt.Errorf("list columns of %s: %w", table, err)
	}
	defer rows.Close()
	names, err := rows.Columns()
	return names, errors.Join(err, rows.Err())
}

// encode returns the bytes that a seal authenticates: each column that is not zero,
// ordered by name, with name and value each prefixed by its length. The encoding is
// injective, so no two rows have the same.
func (s Sealed) encode(values map[string]any) []byte {
	var b []byte
	put := func(kind byte, name string, value []byte) {
		b = binary.BigEndian.AppendUint32(b, uint32(len(name)))
		b = append(b, name...)
		b = append(b, kind)
		b = binary.BigEndian.AppendUint32(b, uint32(len(value)))
		b = append(b, value...)
	}
	number := func(kind byte, name string, n uint64) { put(kind, name, binary.BigEndian.AppendUint64(nil, n)) }
	for _, name := range slices.Sorted(maps.Keys(values)) {
		switch v := values[name].(type) {
		case int64:
			if v != 0 {
				number('i', name, uint64(v))
			}
		case string:
			if v != "" {
				put('s', name, []byte(v))
			}
		case []byte:
			if len(v) > 0 {
				put('b', name, v)
			}
		case bool:
			if v {
				number('i', name, 1)
			}
		case float64: // a tampered column in SQLite, which does not enforce types
			number('f', name, math.Float64bits(v))
		default:
			put('n', name, fmt.Append(nil, v))
		}
	}
	return b
}
