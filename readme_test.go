package createos_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/createos-lease/createos"
)

func readFile(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	require.NoError(t, err)
	return strings.ReplaceAll(string(text), "\r\n", "\n")
}

// The README's program is an Example, whose output is checked.
func TestReadmeProgramIsAnExample(t *testing.T) {
	_, program, ok := strings.Cut(readFile(t, "README.md"), "\nfunc main() {\n")
	require.True(t, ok)
	program, _, ok = strings.Cut(program, "```\n")
	require.True(t, ok)

	_, example, ok := strings.Cut(readFile(t, "example_test.go"), "\nfunc Example() {\n")
	require.True(t, ok)
	example = regexp.MustCompile(`(?m)^\t// Output:\n(\t// .*\n)+`).ReplaceAllString(example, "")
	example, _, ok = strings.Cut(example, "\n// setup makes")
	require.True(t, ok)
	assert.Equal(t, strings.TrimSpace(example), strings.TrimSpace(program))
}

// The configuration table names the keys that there are, and the fields that
// they have.
func TestReadmeConfigurationTable(t *testing.T) {
	rows := regexp.MustCompile("(?m)^\\| `(\\w+)` \\| `(\\w+)` \\|").FindAllStringSubmatch(section(t, "Configuration"), -1)
	fields := exportedFields(t, "config.go", "Config")
	var named []string
	for _, row := range rows {
		named = append(named, row[2])
		_, err := createos.ParseConfig(map[string]any{row[1]: nil})
		require.Error(t, err, "apiUrl and shape are missing")
		assert.NotContains(t, err.Error(), "unknown key", row[1])
	}
	assert.ElementsMatch(t, fields, named)
}

// What the README names as a proof is there.
func TestReadmeNamesTests(t *testing.T) {
	var tests strings.Builder
	for _, pattern := range []string{"*_test.go", "internal/*/*_test.go"} {
		files, err := filepath.Glob(pattern)
		require.NoError(t, err)
		for _, name := range files {
			tests.WriteString(readFile(t, name))
		}
	}
	named := regexp.MustCompile(`Test[A-Z]\w+`).FindAllString(readFile(t, "README.md"), -1)
	require.NotEmpty(t, named)
	for _, name := range named {
		assert.True(t, strings.Contains(tests.String(), "\nfunc "+name+"(t *testing.T)"), name) // which would print all of it
	}
}

// Every error that the README names exists, and it names every one that a
// caller can match.
func TestReadmeErrors(t *testing.T) {
	exported := exportedErrors(t)
	named := make(map[string]bool)
	for _, m := range regexp.MustCompile("`\\*?(Err[A-Z]\\w*|[A-Z]\\w*Error)`").FindAllStringSubmatch(readFile(t, "README.md"), -1) {
		named[m[1]] = true
		assert.Contains(t, exported, m[1])
	}
	for _, name := range exported {
		switch name {
		case "FieldError": // a part of ConfigError
		case "ErrNotFound", "ErrExecForeignLease": // a host meets ErrUnjudged, ErrForeignLease
		case "RequestError", "ConnectionError", "ResponseError", "WorkspaceError": // matched by class; in another table
		default:
			assert.True(t, named[name], "the README does not name %s", name)
		}
	}
}

// section is the text below a heading of the README.
func section(t *testing.T, heading string) string {
	_, text, ok := strings.Cut(readFile(t, "README.md"), "\n## "+heading+"\n")
	require.True(t, ok)
	text, _, _ = strings.Cut(text, "\n## ")
	return text
}

// sources parses the package, without its tests.
func sources(t *testing.T, pattern string) []*ast.File {
	names, err := filepath.Glob(pattern)
	require.NoError(t, err)
	var files []*ast.File
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		require.NoError(t, err)
		files = append(files, file)
	}
	require.NotEmpty(t, files)
	return files
}

func exportedErrors(t *testing.T) []string {
	var names []string
	for _, file := range sources(t, "*.go") {
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.FuncDecl:
				return false
			case *ast.TypeSpec:
				if n.Name.IsExported() && strings.HasSuffix(n.Name.Name, "Error") {
					names = append(names, n.Name.Name)
				}
			case *ast.ValueSpec:
				for _, id := range n.Names {
					if strings.HasPrefix(id.Name, "Err") {
						names = append(names, id.Name)
					}
				}
			}
			return true
		})
	}
	return names
}

func exportedFields(t *testing.T, file, typ string) []string {
	var names []string
	for _, file := range sources(t, file) {
		ast.Inspect(file, func(n ast.Node) bool {
			spec, ok := n.(*ast.TypeSpec)
			if !ok || spec.Name.Name != typ {
				return true
			}
			for _, field := range spec.Type.(*ast.StructType).Fields.List {
				for _, id := range field.Names {
					if id.IsExported() {
						names = append(names, id.Name)
					}
				}
			}
			return false
		})
	}
	return names
}
