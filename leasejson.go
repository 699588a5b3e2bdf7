package createos

import (
	"bytes"
	"encoding/json"
	"errors"
	"maps"
	"math"
	"reflect"
	"slices"
)

// keptKeys holds the JSON of keys that are only carried along, nil for none. It
// is a func because nothing prints what a func holds, also by reflection. The
// map is never changed.
type keptKeys func() map[string]json.RawMessage

func keep(keys map[string]json.RawMessage) keptKeys {
	if len(keys) == 0 {
		return nil
	}
	return func() map[string]json.RawMessage { return keys }
}

func (k keptKeys) keys() map[string]json.RawMessage {
	if k == nil {
		return nil
	}
	return k()
}

// MarshalJSON writes the known keys in their order, and then those that the
// lease came with and that are not known.
func (l Lease) MarshalJSON() ([]byte, error) {
	var o objectWriter
	o.value("providerLeaseId", l.ProviderLeaseID)
	o.value("metadata", l.Metadata)
	o.values(l.kept.keys())
	return o.finish()
}

// UnmarshalJSON reads a lease. It fails when the lease is no object, when its id
// is no string, or when its metadata is neither an object nor null. A missing id
// is empty, and a lease without metadata belongs to nobody; neither is an error
// here.
func (l *Lease) UnmarshalJSON(data []byte) error {
	if isNull(data) {
		return nil // as encoding/json asks for
	}
	var keys map[string]json.RawMessage
	if json.Unmarshal(data, &keys) != nil {
		return errors.New("createos: lease is not a JSON object")
	}
	read := Lease{Metadata: Metadata{older: true}}
	if json.Unmarshal(orNull(keys["providerLeaseId"]), &read.ProviderLeaseID) != nil {
		return errors.New("createos: providerLeaseId of a lease is not a string")
	}
	if err := json.Unmarshal(orNull(keys["metadata"]), &read.Metadata); err != nil {
		return err
	}
	delete(keys, "providerLeaseId")
	delete(keys, "metadata")
	read.kept = keep(keys)
	*l = read
	return nil
}

// MarshalJSON writes the metadata under the names that all implementations
// share. A lease that was read from an older form is written in that form.
func (m Metadata) MarshalJSON() ([]byte, error) {
	kept := m.kept.keys()
	var o objectWriter
	for _, f := range metadataFields {
		if f.newer && m.older {
			continue
		}
		if slices.Contains(m.malformed, f.name) {
			if raw, ok := kept[f.name]; ok {
				o.value(f.name, raw)
			}
			continue
		}
		if value := f.value(&m); value != nil {
			o.value(f.name, value)
		}
	}
	unknown := maps.Clone(kept)
	maps.DeleteFunc(unknown, func(name string, _ json.RawMessage) bool { return isMetadataField(name) })
	o.values(unknown)
	return o.finish()
}

// UnmarshalJSON reads metadata. It fails only when data is neither an object nor
// null.
func (m *Metadata) UnmarshalJSON(data []byte) error {
	if isNull(data) {
		return nil
	}
	// A map, because encoding/json takes a struct's keys in any case: a lease
	// with "CompanyID" would belong to somebody.
	var keys map[string]json.RawMessage
	if json.Unmarshal(data, &keys) != nil {
		return errors.New("createos: metadata of a lease is not a JSON object")
	}
	read := Metadata{older: true}
	for _, f := range metadataFields {
		if _, present := keys[f.name]; present && f.newer {
			read.older = false
		}
	}
	for _, f := range metadataFields {
		if f.newer && read.older {
			continue
		}
		if f.read(&read, orNull(keys[f.name])) {
			delete(keys, f.name)
		} else {
			read.malformed = append(read.malformed, f.name)
		}
	}
	read.kept = keep(keys)
	*m = read
	return nil
}

// metadataField ties a key of the JSON form to its field.
type metadataField struct {
	name  string
	newer bool // absent from the leases of older implementations
	// read fills the field and reports whether the JSON was of the right type.
	// A missing key reads as null. What is not of the right type leaves zero.
	read func(m *Metadata, raw json.RawMessage) bool
	// value returns what is written; nil leaves the key out.
	value func(m *Metadata) any
}

// metadataFields are all known keys, in the order in which they are written.
var metadataFields = []metadataField{
	field("provider", func(m *Metadata) *string { return &m.Provider }, readNullable),
	field("apiUrl", func(m *Metadata) *string { return &m.APIURL }, readNullable),
	field("companyId", func(m *Metadata) *string { return &m.CompanyID }, readNullable),
	field("environmentId", func(m *Metadata) *string { return &m.EnvironmentID }, readNullable),
	field("remoteCwd", func(m *Metadata) *string { return &m.RemoteCwd }, readNullable),
	field("shellCommand", func(m *Metadata) *string { return &m.ShellCommand }, readNullable),
	field("marker", func(m *Metadata) *string { return &m.Marker }, readNullable),
	field("shape", func(m *Metadata) *string { return &m.Shape }, readNullable),
	field("rootfs", func(m *Metadata) *string { return &m.Rootfs }, readNullable).zeroIs(null),
	field("region", func(m *Metadata) *string { return &m.Region }, readNullable).zeroIs(null),
	field("reuseLease", func(m *Metadata) *bool { return &m.ReuseLease }, readNullable),
	field("adapterType", func(m *Metadata) *string { return &m.AdapterType }, readNullable).zeroIs(null).since(),
	field("baseEgressAllowlist", func(m *Metadata) *[]string { return &m.BaseEgressAllowlist }, readList).zeroIs([]string{}).since(),
	field("effectiveEgressAllowlist", func(m *Metadata) *[]string { return &m.EffectiveEgressAllowlist }, readList).zeroIs([]string{}).since(),
	field("autoPauseAfterSeconds", func(m *Metadata) *int { return &m.AutoPauseAfterSeconds }, readCount).zeroIs(null).since(),
	field("leaseKey", func(m *Metadata) *string { return &m.LeaseKey }, readNullable).zeroIs(nil),
	field("sandboxName", func(m *Metadata) *string { return &m.SandboxName }, readNullable).zeroIs(nil),
	field("accountId", func(m *Metadata) *string { return &m.AccountID }, readNullable).zeroIs(nil),
	field("resumedLease", func(m *Metadata) *bool { return &m.ResumedLease }, readNullable).zeroIs(nil),
}

// isMetadataField tells the known keys that are kept, for being malformed, from
// the unknown ones.
func isMetadataField(name string) bool {
	return slices.ContainsFunc(metadataFields, func(f metadataField) bool { return f.name == name })
}

func field[T any](name string, at func(*Metadata) *T, read func(json.RawMessage) (T, bool)) metadataField {
	return metadataField{
		name: name,
		read: func(m *Metadata, raw json.RawMessage) bool {
			value, ok := read(raw)
			if ok {
				*at(m) = value
			}
			return ok
		},
		value: func(m *Metadata) any { return *at(m) },
	}
}

// zeroIs sets what is written for the zero value; nil leaves the key out.
func (f metadataField) zeroIs(written any) metadataField {
	value := f.value
	f.value = func(m *Metadata) any {
		if v := value(m); !reflect.ValueOf(v).IsZero() {
			return v
		}
		return written
	}
	return f
}

// since marks a field that older leases do not have.
func (f metadataField) since() metadataField {
	f.newer = true
	return f
}

// null is JSON's null, which is also how a missing key is read.
var null = json.RawMessage("null")

func orNull(raw json.RawMessage) json.RawMessage {
	if raw == nil {
		return null
	}
	return raw
}

func isNull(raw []byte) bool { return bytes.Equal(bytes.TrimSpace(raw), null) }

// readNullable reads a string or a boolean; null is the zero value.
func readNullable[T string | bool](raw json.RawMessage) (value T, ok bool) {
	err := json.Unmarshal(raw, &value)
	return value, err == nil
}

// readList reads a list of strings. Null is no list: it may have been a
// restriction once. Nor are null entries strings, which encoding/json would take
// for empty ones.
func readList(raw json.RawMessage) ([]string, bool) {
	var entries []*string
	if json.Unmarshal(raw, &entries) != nil || entries == nil || slices.Contains(entries, nil) {
		return nil, false
	}
	list := make([]string, len(entries))
	for i, entry := range entries {
		list[i] = *entry
	}
	return list, true
}

// readCount reads a whole number that is not negative; null is 0.
func readCount(raw json.RawMessage) (int, bool) {
	if isNull(raw) {
		return 0, true
	}
	n, ok := wholeNumber(json.Number(raw))
	if !ok || n < 0 || n > math.MaxInt32 {
		return 0, false
	}
	return int(n), true
}

// objectWriter writes a JSON object whose keys keep their order.
type objectWriter struct {
	buf bytes.Buffer
	err error
}

func (o *objectWriter) value(name string, value any) {
	key, err := json.Marshal(name)
	o.err = errors.Join(o.err, err)
	written, err := json.Marshal(value)
	o.err = errors.Join(o.err, err)
	if o.buf.Len() > 0 {
		o.buf.WriteByte(',')
	}
	o.buf.Write(key)
	o.buf.WriteByte(':')
	o.buf.Write(written)
}

// values writes kept keys, sorted, so that a lease is always written the same.
func (o *objectWriter) values(kept map[string]json.RawMessage) {
	for _, name := range slices.Sorted(maps.Keys(kept)) {
		o.value(name, kept[name])
	}
}

func (o *objectWriter) finish() ([]byte, error) {
	if o.err != nil {
		return nil, o.err
	}
	return slices.Concat([]byte("{"), o.buf.Bytes(), []byte("}")), nil
}
